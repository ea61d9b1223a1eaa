"""Copies between slots of a state pool whose numbers only the device knows: snapshots for a prefix cache."""

from __future__ import annotations

import torch

from bole_runtime.backend_choice import backend_name
from bole_runtime.validate import check_index, not_a


def copy_slots(pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy slots of all layers. No host sync on a device, so a CUDA graph can hold the call.

    Args:
        pool: [layers, slots, ...], every slot of a layer one dense block of memory; any dtype.
        source: int32 or int64 [B].
        target: int32 or int64 [B]; rows where either number is outside the slots copy nothing. A target may be no other
            row's source or target.

    Raises:
        TypeError: no tensors, or indices that are no integers.
        ValueError: wrong shapes or devices, or slots that are no dense block. Nothing has been written.
    """
    if not isinstance(pool, torch.Tensor):
        not_a("pool", pool, "a torch.Tensor")
    if pool.dim() < 3:
        raise ValueError(f"pool: expected [layers, slots, ...], got {pool.dim()} dimensions")
    if not isinstance(source, torch.Tensor):
        not_a("source", source, "a torch.Tensor")
    rows = source.shape[0] if source.dim() else 0
    source = check_index("source", source, pool.device, rows)
    target = check_index("target", target, pool.device, rows)
    words = _blocks(pool)
    if not rows or not words.numel():
        return
    if backend_name(pool.device) == "triton":
        from bole_runtime.state.copy_slots_triton import copy_on_device

        copy_on_device(words, source, target)
        return
    slots = pool.shape[1]
    for s, t in zip(source.tolist(), target.tolist(), strict=True):
        if 0 <= s < slots and 0 <= t < slots:
            words[:, t] = words[:, s]


def _blocks(pool: torch.Tensor) -> torch.Tensor:
    """Return the pool as [layers, slots, elements of a slot], whatever the order of dimensions inside a slot."""
    strides = pool.stride()
    inside = sorted(range(2, pool.dim()), key=lambda d: (-strides[d], d))
    elements, expected = 1, 1
    for d in reversed(inside):
        if pool.shape[d] != 1 and strides[d] != expected:
            raise ValueError(f"pool: the slots are no dense blocks, strides are {strides}")
        expected *= pool.shape[d]
        elements *= pool.shape[d]
    return pool.as_strided((*pool.shape[:2], elements), (*strides[:2], 1))
