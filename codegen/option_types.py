"""How single options of ``bole-tune`` are read. What is empty is refused: it would pass for an option left out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

#: Samplers take seeds below 2**32, and every bucket adds its place to that of the search.
LARGEST_SEED = 2**31 - 1


def list_of(kind: Callable[[str], T], allowed: Sequence[str] | None = None) -> Callable[[str], list[T]]:
    """Return what reads a list separated by commas."""

    def parse(text: str) -> list[T]:
        words = [w.strip() for w in text.split(",") if w.strip()]
        if not words:
            raise argparse.ArgumentTypeError("an empty list")
        for word in words:
            if allowed is not None and word not in allowed:
                raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(allowed)}")
        try:
            return [kind(w) for w in words]
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected numbers separated by commas, got {text!r}") from None

    return parse


def words(*allowed: str) -> Callable[[str], list[str]]:
    """Return what reads a list of some of these words."""
    return list_of(str, allowed)


def seed(text: str) -> int:
    """Read a seed."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if not 0 <= value <= LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"{value} is not allowed; allowed: 0 to {LARGEST_SEED}")
    return value


def name(text: str) -> str:
    """Read a name."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"expected a name, got {text!r}")
    return text


def path(text: str) -> Path:
    """Read the path of a file or a folder; an empty one would be the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"expected a path, got {text!r}; the current folder is '.'")
    return Path(text)


def key(text: str) -> str:
    """Read a table key; what its parts are is seen later."""
    if not text.strip():
        from bole_codegen.tables.keys import EXAMPLES

        raise argparse.ArgumentTypeError(f"expected a table key, got {text!r}; {EXAMPLES}")
    return text
