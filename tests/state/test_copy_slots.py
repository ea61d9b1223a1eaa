"""Copies of slots with torch, on pools of any strides, and what is refused before anything is written."""

from __future__ import annotations

import pytest
import torch
from bole_testing.slot_pools import check_copies, slot_pools

from bole_runtime.state.copy_slots import copy_slots


@pytest.mark.parametrize("name", slot_pools("cpu"))
def test_copies_on_any_strides(name: str) -> None:
    check_copies(slot_pools("cpu")[name])


def test_pools_that_autograd_knows_are_memory_like_any_other() -> None:
    with torch.inference_mode():
        made = torch.arange(12.0).reshape(1, 4, 3)
    for pool in (made, torch.arange(12.0).reshape(1, 4, 3).requires_grad_()):
        copy_slots(pool, torch.tensor([0]), torch.tensor([3]))
        assert pool.tolist()[0][3] == [0.0, 1.0, 2.0]


def test_what_is_no_copy_is_refused() -> None:
    pool, one = torch.zeros(2, 5, 3), torch.tensor([0])
    with pytest.raises(ValueError, match="target"):
        copy_slots(pool, one, torch.tensor([4, 1]))
    with pytest.raises(TypeError, match="source"):
        copy_slots(pool, torch.tensor([0.0]), one)
    with pytest.raises(TypeError, match="pool"):
        copy_slots(pool.to_sparse(), one, one)
    with pytest.raises(ValueError, match=r"pool: expected \[layers, slots, ...\], got 2 dimensions"):
        copy_slots(pool[0], one, one)
    for shared in (pool[:, :1].expand(2, 5, 3), pool[:1].expand(2, 5, 3), pool.as_strided((2, 3, 3), (9, 2, 1))):
        with pytest.raises(ValueError, match="elements share memory"):
            copy_slots(shared, one, torch.tensor([1]))
