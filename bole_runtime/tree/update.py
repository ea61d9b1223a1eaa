"""Rebuilds a tree with torch operations: plan, check, then store."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from bole_runtime.tree.build_torch import PADDING, STATUS_NODES, as_int32, build, dense_parents, pack_bits
from bole_runtime.tree.check import explain_fault

if TYPE_CHECKING:
    from bole_runtime.tree.tree import TreeBatch


class Plan(NamedTuple):
    """A topology in dense form: first row and usable node count of each request, parents, mask, depths, status."""

    start: torch.Tensor
    counts: torch.Tensor
    parents: torch.Tensor
    mask: torch.Tensor
    depths: torch.Tensor
    status: torch.Tensor


def plan(tree: TreeBatch, source: torch.Tensor, offsets: torch.Tensor | None, check: bool) -> Plan:
    """Work out a topology without touching the tree.

    Args:
        tree: gives the capacities.
        source: parents, dense or packed.
        offsets: for packed parents.
        check: raise on a fault, which reads the device.

    Raises:
        ValueError: the topology is invalid.
    """
    parents, start, given = dense_parents(source, offsets, tree.max_batch, tree.max_nodes)
    counts = given
    if offsets is not None:
        fits = (start >= 0) & (given >= 0) & (start + given <= tree.max_total)
        counts = torch.where(fits, given.clamp(max=tree.max_nodes), 0)
    mask, depths, status = build(parents, counts, tree.max_depth)
    status |= (counts != given).any().int() * STATUS_NODES
    if check and status.item():
        starts = start.tolist() if offsets is not None else None
        raise ValueError(explain_fault(parents, starts, given.tolist(), tree.max_nodes, tree.max_depth, tree.max_total))
    return Plan(start, counts, parents, mask, depths, status)


def store(tree: TreeBatch, made: Plan, offsets: torch.Tensor | None) -> None:
    """Write a plan to the tensors of a tree."""
    tree.status.copy_(made.status)
    words = pack_bits(made.mask)
    if offsets is None:
        tree.parents.copy_(as_int32(made.parents))
        tree.ancestors.copy_(words)
        tree.depths.copy_(made.depths)
        return
    assert tree.offsets is not None
    tree.offsets.copy_(offsets.clamp(0, tree.max_total))
    index = torch.arange(tree.max_nodes, device=tree.device)
    owned = index < made.counts.unsqueeze(1)
    # Rows that are not owned land in one extra row, which is dropped.
    rows = torch.where(owned, made.start.unsqueeze(1) + index, tree.max_total).flatten()
    for target, value, empty in (
        (tree.parents, made.parents, PADDING),
        (tree.depths, made.depths, -1),
        (tree.ancestors, words, 0),
    ):
        buffer = target.new_full((tree.max_total + 1, *target.shape[1:]), empty)
        buffer[rows] = as_int32(value.flatten(0, 1))
        target.copy_(buffer[:-1])
