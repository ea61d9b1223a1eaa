"""What a worker is doing at the moment, told to its parent: time limits and the ledger go by phases."""

from __future__ import annotations

from collections.abc import Callable

_tell: Callable[[str], None] | None = None


def connect(tell: Callable[[str], None] | None) -> None:
    """Set who is told."""
    global _tell
    _tell = tell


def enter(phase: str) -> None:
    """Say that the next phase begins; says nothing outside a worker."""
    if _tell is not None:
        _tell(phase)
