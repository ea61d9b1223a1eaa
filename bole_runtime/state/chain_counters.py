"""How long every slot's pending chain is and where it starts, and the rule of a policy for what happens to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bole_runtime.factors import PendingChain


class ChainCounters:
    """Length and start of the pending chain of every slot, now and before the decision of this round.

    The rows have one entry more than there are slots: writes of padding rows go there.

    Attributes:
        length: int32 [slots], tokens of each chain.
        start: int32 [slots], ring row of each chain's first token.
        before_length: int32 [slots], ``length`` as the commit of this round must see it; only of rows that act.
        before_start: int32 [slots], likewise.
    """

    __slots__ = ("before_length", "before_start", "length", "rows", "slots", "start")

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots = slots
        self.rows = tuple(torch.zeros(slots + 1, dtype=torch.int32, device=device) for _ in range(4))
        self.length, self.start, self.before_length, self.before_start = (t[:slots] for t in self.rows)

    @classmethod
    def borrow(cls, length: torch.Tensor, start: torch.Tensor) -> ChainCounters:
        """Return counters with the values of a caller's tensors, which :meth:`give_back` updates."""
        counters = cls(length.shape[0], length.device)
        counters.length.copy_(length)
        counters.start.copy_(start)
        return counters

    def give_back(self, length: torch.Tensor, start: torch.Tensor) -> None:
        """Write the counters to a caller's tensors."""
        length.copy_(self.length)
        start.copy_(self.start)

    @staticmethod
    def nbytes(slots: int) -> int:
        """Bytes that the counters take."""
        return 4 * 4 * (slots + 1)

    def before(self, chain: PendingChain) -> PendingChain:
        """Return a chain as the commit of this round must see it."""
        return PendingChain(chain.k, chain.v, chain.gates, self.before_length, self.before_start)

    def clear(self, slot: int) -> None:
        """Empty the chain of a slot."""
        self.length[slot].zero_()

    def copy(self, target: int, source: int) -> None:
        """Copy the counters of a slot to another."""
        self.length[target].copy_(self.length[source])
        self.start[target].copy_(self.start[source])


@dataclass(frozen=True)
class ChainRule:
    """How a policy treats a row that accepted something.

    Attributes:
        capacity: rows of a ring.
        limit: a chain that would become longer than this is folded into the state with the path.
        consumed: the chain that stands in the ring is in the state already (the round's verification wrote it).
    """

    capacity: int
    limit: int
    consumed: bool
