"""Static tree shapes: chain, k-ary, and the best tree for given acceptance rates. Host code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bole_runtime.tree.check import check_capacity
from bole_runtime.tree.tree import MAX_NODES, TreeBatch


@dataclass(frozen=True)
class StaticTree:
    """A tree shape: nodes level by level, node 0 the root.

    Attributes:
        parents: parent of each node; -1 for the root.
        ranks: which child of its parent a node is, from 0 (the draft's most probable token, or its first draw).
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def nodes(self) -> int:
        """Number of nodes, the root included."""
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        """Number of strict ancestors of each node."""
        made: list[int] = []
        for parent in self.parents:
            made.append(0 if parent < 0 else made[parent] + 1)
        return tuple(made)

    @property
    def depth(self) -> int:
        """Largest number of strict ancestors."""
        return max(self.depths)

    def expected(self, acceptance: Sequence[float]) -> float:
        """Return the expected length of the accepted path, the root included.

        Args:
            acceptance: entry r is the probability that the walk goes on to the child of rank r, given that it is at
                the parent and the child exists.
        """
        reached: list[float] = []
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            reached.append(1.0 if parent < 0 else reached[parent] * (acceptance[rank] if rank < len(acceptance) else 0))
        return sum(reached)

    def batch(self, batch: int, device: torch.device | str = "cpu") -> TreeBatch:
        """Return dense trees of this shape, with the tight depth bound."""
        check_capacity("batch", batch, 0, 2**31 - 1)
        parents = torch.tensor(self.parents, dtype=torch.int32, device=device)
        return TreeBatch.from_parents(parents.expand(batch, -1), self.depth)


def chain(nodes: int) -> StaticTree:
    """Return one path of ``nodes`` nodes.

    Raises:
        ValueError: not 1 to 512 nodes.
    """
    check_capacity("nodes", nodes, 1, MAX_NODES)
    return StaticTree(tuple(range(-1, nodes - 1)), (0,) * nodes)


def k_ary(branching: Sequence[int]) -> StaticTree:
    """Return the tree whose nodes of level l have ``branching[l]`` children: (2, 2, 2) has 15 nodes.

    Raises:
        TypeError: a width is not an int.
        ValueError: a width is below 1, or the tree has more than 512 nodes.
    """
    if isinstance(branching, int):
        raise TypeError(f"branching: expected widths, one a level, got {branching}; write [{branching}]")
    parents, ranks, level = [-1], [0], [0]
    for width in branching:
        check_capacity("branching", width, 1, MAX_NODES)
        below = []
        for node in level:
            for rank in range(width):
                below.append(len(parents))
                parents.append(node)
                ranks.append(rank)
                check_capacity("branching: number of nodes", len(parents), 1, MAX_NODES)
        level = below
    return StaticTree(tuple(parents), tuple(ranks))


def sequoia(acceptance: Sequence[float], nodes: int, max_depth: int | None = None) -> StaticTree:
    """Return a tree with the largest expected accepted path under positional acceptance rates.

    Dynamic programming over the number of nodes and the depth, as in Sequoia (Chen et al. 2024, arXiv 2402.12374): the
    best subtree of n nodes gives its first child s nodes and the other n - 1 - s to the remaining ranks.

    Args:
        acceptance: entry r is the probability that the walk goes on to the child of rank r, given that it is at the
            parent. At most ``len(acceptance)`` children a node. Entries are >= 0 and sum to at most 1.
        nodes: most nodes, the root included, 1 to 512.
        max_depth: largest number of strict ancestors; default no bound.

    Returns:
        The tree; with fewer nodes where more would gain nothing.

    Raises:
        TypeError: a number has the wrong type.
        ValueError: rates or numbers are out of range.
    """
    check_capacity("nodes", nodes, 1, MAX_NODES)
    depth = nodes - 1 if max_depth is None else check_capacity("max_depth", max_depth, 0, MAX_NODES - 1)
    rates = [float(a) for a in acceptance]
    if not all(0 <= a <= 1 for a in rates) or sum(rates) > 1 + 1e-6:
        raise ValueError(f"acceptance: {rates} is not allowed; allowed: entries >= 0 with a sum of at most 1")
    share = torch.arange(nodes)
    rest = share.unsqueeze(1) - share  # [m, s]: nodes left for further ranks
    value = torch.ones(nodes + 1, dtype=torch.float64)
    value[0] = 0
    choices: list[list[list[int]]] = []  # [level from below][rank][m] -> nodes of that child, 0 ends the list
    for _ in range(min(depth, nodes - 1)):
        below = torch.zeros(nodes, dtype=torch.float64)
        taken: list[list[int]] = []
        for rate in reversed(rates):
            gain = rate * value[:-1].unsqueeze(0) + below[rest.clamp(min=0)]
            gain = torch.where(rest >= 0, gain, -1.0)
            gain[:, 0] = 0
            # A later rank needs the earlier ones; of equal gains the fewest nodes.
            below, best = gain.max(1)
            best = (gain >= below.unsqueeze(1) - 1e-15).int().argmax(1)
            taken.insert(0, best.tolist())
        better = value.clone()
        better[1:] = 1 + below
        if torch.equal(better, value):
            break
        value = better
        choices.append(taken)
    return _unroll(choices, nodes)


def _unroll(choices: list[list[list[int]]], nodes: int) -> StaticTree:
    parents, ranks = [-1], [0]
    # (node, nodes of its subtree, levels that may follow), in level order.
    queue = [(0, nodes, len(choices))]
    for node, size, levels in queue:
        left = size - 1
        for rank, table in enumerate(choices[levels - 1] if levels else []):
            given = table[left]
            if given == 0:
                break
            queue.append((len(parents), given, levels - 1))
            parents.append(node)
            ranks.append(rank)
            left -= given
    return StaticTree(tuple(parents), tuple(ranks))
