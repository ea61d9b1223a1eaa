"""Capacity buckets: which captured graph serves a batch. Host code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bole_runtime.tree.check import check_capacity

if TYPE_CHECKING:
    import torch

    from bole_runtime.tree.tree import TreeBatch

_MOST = 2**31 - 1


@dataclass(frozen=True, order=True)
class Capacity:
    """What a captured graph holds.

    Attributes:
        max_total: rows of the packed tree.
        max_batch: requests.
        max_nodes: most nodes of a request.
        max_depth: largest number of strict ancestors.
    """

    max_total: int
    max_batch: int
    max_nodes: int
    max_depth: int

    def holds(self, batch: int, nodes: int, total: int, depth: int) -> bool:
        """Return whether a batch fits."""
        return (
            batch <= self.max_batch and nodes <= self.max_nodes and total <= self.max_total and depth <= self.max_depth
        )

    def tree(self, device: torch.device | str = "cpu", validate: bool | None = None) -> TreeBatch:
        """Return a packed :class:`TreeBatch` of this capacity, all padding."""
        from bole_runtime.tree.tree import TreeBatch

        return TreeBatch(
            self.max_batch, self.max_nodes, max_depth=self.max_depth, max_total=self.max_total, device=device,
            validate=validate,
        )  # fmt: skip


class CapacityBuckets:
    """An ordered set of capacities; a batch is served by the first that holds it.

    Dispatch reads capacities alone, so one graph a bucket is captured before serving, and topologies, depths and
    counts change between replays.

    Example:
        >>> buckets = CapacityBuckets.grid(batches=[1, 8, 32], nodes_per_request=[4, 16], max_nodes=64)
        >>> buckets.pick(batch=3, nodes=10, total=25, depth=4)
        Capacity(max_total=32, max_batch=8, max_nodes=25, max_depth=24)
    """

    def __init__(self, capacities: Iterable[Capacity]) -> None:
        """Sort the capacities: fewest rows first, then fewest requests.

        Raises:
            TypeError: one is no Capacity, or a number in it no int.
            ValueError: there is none, or one is out of range.
        """
        given = tuple(capacities)
        for n, capacity in enumerate(given):
            if not isinstance(capacity, Capacity):
                raise TypeError(f"capacities[{n}]: expected a Capacity, got {type(capacity).__name__}")
        self._capacities = tuple(sorted(set(given)))
        if not self._capacities:
            raise ValueError("capacities: at least one is needed")
        for c in self._capacities:
            check_capacity("max_batch", c.max_batch, 1, _MOST)
            check_capacity("max_nodes", c.max_nodes, 1, 512)
            check_capacity("max_total", c.max_total, c.max_batch, _MOST)
            check_capacity("max_depth", c.max_depth, 0, c.max_nodes - 1)

    @classmethod
    def grid(
        cls,
        batches: Sequence[int],
        nodes_per_request: Sequence[int],
        max_nodes: int,
        max_depth: int | None = None,
    ) -> CapacityBuckets:
        """Return the buckets ``batch`` x ``batch * nodes``.

        Args:
            batches: numbers of requests.
            nodes_per_request: mean nodes a request; a single request may have up to ``max_nodes``.
            max_nodes: most nodes of a request; at most ``batch * nodes`` where that is less.
            max_depth: default ``max_nodes - 1``.
        """
        made = []
        for batch in batches:
            for nodes in nodes_per_request:
                total = batch * nodes
                # With one node reserved for every other request.
                most = min(max_nodes, total - batch + 1)
                made.append(Capacity(total, batch, most, most - 1 if max_depth is None else min(max_depth, most - 1)))
        return cls(made)

    def pick(self, batch: int, nodes: int, total: int, depth: int) -> Capacity:
        """Return the smallest capacity that holds a batch.

        Args:
            batch: requests.
            nodes: most nodes of one request.
            total: nodes of all requests.
            depth: largest number of strict ancestors.

        Raises:
            ValueError: no bucket holds it.
        """
        for capacity in self._capacities:
            if capacity.holds(batch, nodes, total, depth):
                return capacity
        raise ValueError(
            f"no capacity bucket holds batch {batch}, {nodes} nodes a request, {total} in all, depth {depth}; "
            f"the largest is {self._capacities[-1]}"
        )

    def __iter__(self) -> Iterator[Capacity]:
        """Iterate from the smallest; capture the largest first to share memory pools."""
        return iter(self._capacities)

    def __len__(self) -> int:
        return len(self._capacities)
