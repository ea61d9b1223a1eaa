"""Scratch memory of a call that brings none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_poison = False


def allocate(elements: int, device: torch.device) -> torch.Tensor:
    """Return uninitialised fp32 elements, or NaN within :func:`poisoned`."""
    work = torch.empty(elements, dtype=torch.float32, device=device)
    return work.fill_(math.nan) if _poison else work


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill scratch memory with NaN, so that a kernel that uses what none has written shows."""
    global _poison
    before, _poison = _poison, True
    try:
        yield
    finally:
        _poison = before
