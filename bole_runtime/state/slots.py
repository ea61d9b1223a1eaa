"""Which rows of the pools are in use: a free list on the host, where an engine's scheduler lives."""

from __future__ import annotations


class SlotList:
    """Free and used slots. Reads and writes nothing on a device."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._used: set[int] = set()
        self._count = count

    @property
    def free(self) -> int:
        """Slots that can be allocated."""
        return len(self._free)

    @property
    def used(self) -> frozenset[int]:
        """Slots that were allocated and not freed."""
        return frozenset(self._used)

    def take(self) -> int:
        """Allocate a slot: the one freed last, whose memory is most likely still in a cache.

        Raises:
            RuntimeError: none is free.
        """
        if not self._free:
            raise RuntimeError(f"all {self._count} slots are in use; free one first")
        slot = self._free.pop()
        self._used.add(slot)
        return slot

    def give(self, slot: int) -> None:
        """Free a slot.

        Raises:
            TypeError: not an int.
            ValueError: it is not in use.
        """
        self.check(slot)
        self._used.remove(slot)
        self._free.append(slot)

    def check(self, slot: int, name: str = "slot") -> int:
        """Return a slot that is in use.

        Raises:
            TypeError: not an int.
            ValueError: it is not in use.
        """
        if not isinstance(slot, int) or isinstance(slot, bool):
            raise TypeError(f"{name}: expected an int, got {type(slot).__name__}")
        if slot not in self._used:
            raise ValueError(f"{name}: {slot} is not in use; slots 0 to {self._count - 1} are given out by allocate()")
        return slot
