"""What the benchmarks share: arguments that are checked before anything runs, and files that are whole or not there."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from bole_codegen.measure import make_parents
from bole_runtime.tree import MAX_NODES

#: Of inputs; what is added to it a row stays in the range of every generator.
MAX_SEED = 2**32 - 1


def words(text: str, separator: str = ",") -> list[str]:
    """Parse ``a,b``: each word once, at least one.

    Raises:
        argparse.ArgumentTypeError: no word.
    """
    found = list(dict.fromkeys(word.strip() for word in text.split(separator) if word.strip()))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return found


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``least`` to ``most``, for argparse."""
    allowed = f"{least} or more" if most is None else f"{least} to {most}"

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: whole numbers, {allowed}")
        return number

    return parse


def check_trees(parser: argparse.ArgumentParser, shapes: Iterable[str], nodes: Iterable[int]) -> None:
    """Leave with a usage error where a shape or a number of nodes makes no tree."""
    for shape in shapes:
        try:
            make_parents(shape, 1, 1)
        except ValueError as error:
            parser.error(f"--shape: {error}")
    for count in nodes:
        if not 1 <= count <= MAX_NODES:
            parser.error(f"{count} nodes are not allowed; allowed: 1 to {MAX_NODES} a request")


def check_outputs(parser: argparse.ArgumentParser, files: Mapping[str, Path | None]) -> None:
    """Leave with a usage error where a file cannot be written, or two options name one file.

    Args:
        parser: says so.
        files: option to its file, None where there is none.
    """
    taken: dict[str, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        if os.path.isdir(path):
            parser.error(f"{option}: {path} is a folder; name a file")
        folder = next(p for p in path.absolute().parents if os.path.exists(p))
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            parser.error(f"{option}: no file can be written to {folder}")
        other = taken.setdefault(os.path.realpath(path), option)
        if other != option:
            parser.error(f"{option}: {path} is the file of {other} already")


def write_whole(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a run that is killed, never sees half of it; its mode follows the umask."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8", newline="")  # A device or a pipe has nothing to replace.
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8", newline="")
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
