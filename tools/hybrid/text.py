"""Bytes of the standard library's sources, some files held out."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import torch

#: One file in so many is held out.
HELD_OUT = 40


def read_library(most_bytes: int | None = None) -> tuple[torch.Tensor, list[bytes]]:
    """Return the training text, uint8, and the files held out.

    Args:
        most_bytes: stop there, once a few files are held out; default, everything.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    taken, held, size = [], [], 0
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if {"site-packages", "dist-packages", "test", "tests"} & set(inside.parts):
            continue
        content = path.read_bytes()
        # By name, so that the same files are held out wherever the library lies.
        if zlib.crc32(str(inside).encode()) % HELD_OUT == 0:
            held.append(content)
            continue
        taken.append(content + b"\n")
        size += len(content)
        if most_bytes is not None and size > most_bytes and len(held) >= 6:
            break
    return torch.frombuffer(bytearray(b"".join(taken)), dtype=torch.uint8), held


def draw(text: torch.Tensor, rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Return random stretches of a text, int64 [rows, length]."""
    starts = torch.randint(0, text.numel() - length, (rows, 1), generator=generator)
    return text[starts + torch.arange(length)].long()


def prompts_of(held: list[bytes], count: int, length: int) -> list[list[int]]:
    """Return the beginnings of held-out files that are long enough."""
    found = [list(f[:length]) for f in held if len(f) >= 2 * length]
    return found[:count]
