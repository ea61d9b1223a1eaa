"""Pools for copies of slots: every kind of strides that an engine's memory can have."""

from __future__ import annotations

import torch


def slot_pools(device: str) -> dict[str, torch.Tensor]:
    """Return pools [layers, slots, ...] by name, views of larger memory where slots are no dense block."""

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def columns() -> torch.Tensor:
        return new(2, 6, 40, 6, dtype=torch.bfloat16)

    return {
        "dense": new(3, 6, 2, 33, 65),
        "dense, layers of a slot side by side": new(6, 2, 3, 8).transpose(0, 1),
        "dense in another order": new(2, 6, 3, 50).transpose(2, 3),
        "every other slot": new(2, 12, 3, 5)[:, ::2],
        "the first columns of each channel (vLLM's DS)": columns()[..., :3],
        "the last columns, channels apart": columns()[:, :, ::3, 3:],
        "one column": columns()[..., 2:3],
        "the first rows of channels (vLLM's SD)": new(2, 6, 6, 40)[:, :, :3].transpose(2, 3),
        "three apart": new(2, 6, 4, 10, 20)[:, :, :, ::2, ::3],
        "three apart, turned": new(2, 6, 4, 10, 20)[:, :, :, ::2, ::3].permute(0, 1, 4, 2, 3),
        "five apart": new(2, 6, 3, 4, 4, 4, 6)[:, :, :, :3, :3, :3, ::2],
        "ints of a byte": torch.randint(-9, 9, (2, 6, 7, 9), dtype=torch.int8, device=device)[..., 1:8],
        "one element a slot": new(2, 6, 1),
    }


def padded(pool: torch.Tensor) -> torch.Tensor:
    """Return the whole memory that a pool is a view of, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=pool.device).set_(pool.untyped_storage())


def check_copies(pool: torch.Tensor) -> None:
    """Copy slots of a pool, some rows naming none, and compare every byte of its memory with indexing."""
    from bole_runtime.state.copy_slots import copy_slots

    memory = padded(pool)
    before = memory.clone()
    pool[:, 3], pool[:, 4] = pool[:, 0].clone(), pool[:, 1].clone()
    want = memory.clone()
    memory.copy_(before)
    device = pool.device
    source = torch.tensor([0, -1, 1, 2, 0, 5, 1 << 40], device=device)
    target = torch.tensor([3, 2, 4, -1, 9, 5, 2], dtype=torch.int32, device=device)
    copy_slots(pool, source, target)
    assert torch.equal(memory, want)
    assert not torch.equal(memory, before)
