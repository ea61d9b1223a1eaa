"""Copies between slots of a state pool whose numbers only the device knows: snapshots for a prefix cache."""

from __future__ import annotations

import torch

from bole_runtime.backend_choice import backend_name
from bole_runtime.tree.check import check_dense
from bole_runtime.validate import check_index, not_a
from bole_runtime.validate_memory import check_elements_apart


def copy_slots(pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy slots of all layers. No host sync on a device, so a CUDA graph can hold the call.

    One launch on a device. A slot that is one dense block of memory, in whatever order of its dimensions, is read and
    written in a row; another one element by element of its shape.

    Args:
        pool: [layers, slots, ...], any strides, no two elements in one place; any dtype.
        source: int32 or int64 [B].
        target: int32 or int64 [B]; rows where either number is outside the slots copy nothing. A target may be no other
            row's source or target.

    Raises:
        TypeError: no tensors, or indices that are no integers.
        ValueError: wrong shapes or devices, or elements that share memory. Nothing has been written.
    """
    check_pool("pool", pool)
    if not isinstance(source, torch.Tensor):
        not_a("source", source, "a torch.Tensor")
    rows = source.shape[0] if source.dim() else 0
    source = check_index("source", source, pool.device, rows)
    target = check_index("target", target, pool.device, rows)
    if not rows or not pool.numel():
        return
    words = _merged(pool)
    if backend_name(pool.device) == "triton":
        from bole_runtime.state.copy_slots_triton import copy_on_device

        copy_on_device(words, source, target)
        return
    slots = pool.shape[1]
    with torch.inference_mode():  # as commits are: pools made in it, or that autograd knows, are no other memory
        for s, t in zip(source.tolist(), target.tolist(), strict=True):
            if 0 <= s < slots and 0 <= t < slots:
                words[:, t] = words[:, s]


def check_pool(name: str, pool: torch.Tensor) -> None:
    """Check what :func:`copy_slots` needs of a pool, where it is made.

    Raises:
        TypeError: no dense tensor.
        ValueError: too few dimensions, or elements that share memory.
    """
    if not isinstance(pool, torch.Tensor):
        not_a(name, pool, "a torch.Tensor")
    check_dense(name, pool)
    if pool.dim() < 3:
        raise ValueError(f"{name}: expected [layers, slots, ...], got {pool.dim()} dimensions")
    check_elements_apart(name, pool)


def _merged(pool: torch.Tensor) -> torch.Tensor:
    """Return the pool with the dimensions of a slot by falling stride, those that are one run of memory merged."""
    inside: list[tuple[int, int]] = []
    dims = zip(pool.shape[2:], pool.stride()[2:], strict=True)
    for size, stride in sorted((d for d in dims if d[0] > 1), key=lambda d: -d[1]):
        if inside and inside[-1][1] == size * stride:
            inside[-1] = (inside[-1][0] * size, stride)
        else:
            inside.append((size, stride))
    sizes, strides = [n for n, _ in inside or [(1, 1)]], [s for _, s in inside or [(1, 1)]]
    return pool.as_strided((*pool.shape[:2], *sizes), (*pool.stride()[:2], *strides))
