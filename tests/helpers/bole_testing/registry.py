"""Keeps what a test registers from reaching the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bole_runtime import families


@contextmanager
def families_restored() -> Iterator[None]:
    """Forget the families that are registered inside."""
    known, references = dict(families.FAMILIES), dict(families._references)
    try:
        yield
    finally:
        for table, before in ((families.FAMILIES, known), (families._references, references)):
            table.clear()
            table.update(before)
