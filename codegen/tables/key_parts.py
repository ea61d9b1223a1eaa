"""The parts of a table key or of a bucket's name: which of them cannot be read, and what they may be."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Of a size: more digits are no number that a table can hold.
NUMBER = r"[0-9]{1,15}"
#: Of anything that is one of a list of words.
WORD = r"[a-z0-9_.]+"


class KeyFault(ValueError):
    """A text that is no key; ``faults`` says why, a line for each part."""

    def __init__(self, text: str, faults: Sequence[str], shape: bool, examples: str) -> None:
        what = "; ".join(faults)
        super().__init__(f"{text!r} is no table key: {what}; {examples}" if shape else f"{text!r}: {what}")
        self.faults = tuple(faults)


@dataclass(frozen=True)
class Part:
    """One part of a key or a name.

    Attributes:
        doc: what it says.
        pattern: with a named group for each word and number.
        example: that it matches.
    """

    doc: str
    pattern: str
    example: str


@dataclass(frozen=True)
class Form:
    """One way to write a key.

    Attributes:
        separator: between parts.
        parts: in order; the last takes all that is left.
    """

    separator: str
    parts: tuple[Part, ...]

    @property
    def example(self) -> str:
        """A key of this form."""
        return self.separator.join(p.example for p in self.parts)


def plain(text: str) -> str:
    """Return a key as tables write it: in lower case, with single blanks and none around slashes."""
    return re.sub(r" ?/ ?", "/", " ".join(text.lower().split()))


def first_word(text: str) -> str:
    """Return the operation that a plain key or name begins with."""
    return re.split(r"[/ ]", text, maxsplit=1)[0]


def read_parts(
    given: str, forms: tuple[Form, Form], allowed: Mapping[str, Sequence[str]], examples: str
) -> dict[str, str]:
    """Return the words of a key or a name; those that may be left out are None or missing.

    Args:
        given: what was typed.
        forms: of a key and of a name.
        allowed: what the words may be, by group.
        examples: what to say where a part has another shape.

    Raises:
        KeyFault: a part cannot be read; names each such part and what it may be.
    """
    text = plain(given)
    # A name has one slash, between its types.
    key, name = forms
    form = key if text.count("/") > 1 or " " not in text else name
    texts = text.split(form.separator, len(form.parts) - 1)
    words: dict[str, str] = {}
    faults: list[str] = []
    shape = False
    for part, one in zip(form.parts, texts, strict=False):
        found = re.fullmatch(part.pattern, one)
        if found is None:
            shape = True
            faults.append(f"{one!r} should be {part.doc}, such as {part.example}")
            continue
        words.update(found.groupdict())
        for group, word in found.groupdict().items():
            if group in allowed and word not in allowed[group]:
                faults.append(f"{group} {word!r} is not one of {', '.join(allowed[group])}")
    missing = form.parts[len(texts) :]
    if missing:
        shape = True
        faults.append(f"it ends before {', '.join(f'{p.doc} ({p.example})' for p in missing)}")
    if faults:
        raise KeyFault(given, faults, shape, examples)
    return words
