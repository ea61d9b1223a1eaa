"""Numbers of things, as people read them."""

from __future__ import annotations


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number and what it is of: ``1 entry``, ``2 entries``.

    Args:
        number: how many.
        one: the word for one of them.
        many: the word for more, or for none; without it, ``one`` with an s.
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


def entries(number: int, what: str = "") -> str:
    """Return a number of entries, of what sort they are before the word."""
    sort = f"{what} " if what else ""
    return counted(number, f"{sort}entry", f"{sort}entries")
