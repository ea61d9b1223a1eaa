"""Checks of index values. They read tensors, so on a device they cost a host sync: CPU tensors, or
``validate=True``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bole_runtime.factors import PendingChain
from bole_runtime.tree import TreeBatch

if TYPE_CHECKING:
    from bole_runtime.conv.factors import ConvPending


def check_slots(slots: torch.Tensor, pool_slots: int) -> None:
    """Check that every slot is -1 or a row of the pool.

    Raises:
        ValueError: a slot is out of range.
    """
    bad = (slots < -1) | (slots >= pool_slots)
    if bool(bad.any()):
        row = int(bad.int().argmax())
        raise ValueError(f"slots: slots[{row}] = {int(slots[row])} is outside -1 (padding) to {pool_slots - 1}")


def duplicated(slots: torch.Tensor) -> list[int]:
    """Return the slots that two requests have, padding apart."""
    live, counts = torch.unique(slots[slots >= 0], return_counts=True)
    return [int(slot) for slot in live[counts > 1]]


def check_status(tree: TreeBatch) -> None:
    """Check that the tree was built without a fault.

    Raises:
        ValueError: its status is not 0.
    """
    status = int(tree.status)
    if status:
        names = (
            "parent not before child",
            "depth above max_depth",
            "node count above max_nodes",
            "parent is no live node",
            "more nodes in all than max_total",
        )
        faults = ", ".join(name for bit, name in enumerate(names) if status >> bit & 1)
        raise ValueError(f"tree: status {status} ({faults})")


def check_pending_values(pending: PendingChain | ConvPending, slots: torch.Tensor) -> None:
    """Check length and start of the rings that are read.

    Raises:
        ValueError: out of range.
    """
    live = slots[slots >= 0].long()
    for name, t, high in (
        ("pending.length", pending.length, pending.capacity),
        ("pending.start", pending.start, pending.capacity - 1),
    ):
        used = t[live]
        if bool(((used < 0) | (used > high)).any()):
            raise ValueError(f"{name}: values must be 0 to {high}, got {used.tolist()} in the slots of the batch")


def check_accepted(accepted: torch.Tensor, slots: torch.Tensor, tree: TreeBatch) -> None:
    """Check that accepted nodes are -1 or live nodes, and that no live slot is written twice.

    Raises:
        ValueError: an accepted node is outside the tree or padding, or a slot is duplicated.
    """
    live = tree.rows()[1].tolist()
    seen: dict[int, int] = {}
    for b, (slot, node) in enumerate(zip(slots.tolist(), accepted.tolist(), strict=True)):
        if slot < 0:
            continue
        if not -1 <= node < tree.max_nodes:
            raise ValueError(f"accepted: accepted[{b}] = {node} is outside -1 (nothing) to {tree.max_nodes - 1}")
        if node >= 0 and not live[b][node]:
            raise ValueError(f"accepted: accepted[{b}] = {node} is a padding node of its tree")
        if slot in seen:
            raise ValueError(f"slots: requests {seen[slot]} and {b} both commit to slot {slot}")
        seen[slot] = b
