"""Binary trees to check kernels with, of any depth."""

from __future__ import annotations

import torch

from bole_runtime.tree.tree import TreeBatch


def binary_trees(batch: int, nodes: int, max_depth: int | None, packed: bool, device: torch.device) -> TreeBatch:
    """Build equal binary trees, cut where they would be too deep: nodes near the roots and far below them.

    Args:
        batch: requests.
        nodes: nodes of each.
        max_depth: the depth capacity; default ``nodes - 1``.
        packed: one flat buffer.
        device: of the trees.

    Returns:
        The trees, of which every node is live.
    """
    row, depths = [-1], [0]
    for i in range(1, nodes):
        parent = (i - 1) // 2
        row.append(parent if max_depth is None or depths[parent] < max_depth else -1)
        depths.append(depths[parent] + 1 if row[i] >= 0 else 0)
    parents = torch.tensor([row] * batch, dtype=torch.int32, device=device)
    if not packed:
        return TreeBatch.from_parents(parents, max_depth=max_depth)
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=device) * nodes
    return TreeBatch.from_packed(parents.flatten(), offsets, nodes, max_depth=max_depth)


def deepest_node(trees: TreeBatch) -> int:
    """Return a deepest node of :func:`binary_trees`; it is the same in every request."""
    return int(trees.depths.flatten()[: trees.max_nodes].argmax())
