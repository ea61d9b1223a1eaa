"""Offsets, rings and strides that would lead the kernels of a convolution out of their buffers, or far away in them."""

from __future__ import annotations

import pytest
import torch
from bole_testing.close import assert_same_bits
from bole_testing.conv import conv_config

from bole_runtime import ConvFactors, ConvPending, TreeBatch, conv_commit, tree_conv

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]

C = 20
WEIGHT = torch.randn(C, 4, generator=torch.Generator().manual_seed(1))


def far(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    # Memory that is never touched is never there.
    return torch.empty(2**31 + 4096, dtype=dtype).as_strided(shape, strides)


@pytest.mark.parametrize("offsets", [[0, 2, 50], [0, 40, 44], [-40, 2, 4], [0, 4, -20]])
def test_offsets_of_an_invalid_tree_stay_in_the_buffers(offsets: list[int]) -> None:
    tree = TreeBatch.from_packed(torch.tensor([-1, 0, -1, 0]), torch.tensor(offsets), 48, validate=False)
    buffer = torch.full((100, C), 7.0)
    pool = torch.randn(2, C, 3)
    _, factors = tree_conv(
        torch.randn(4, C), WEIGHT, state=pool, slots=torch.tensor([0, 1]), tree=tree, out=buffer[48:52],
        variant=conv_config(32, 16, 1), validate=False,
    )  # fmt: skip
    assert bool((buffer[:48] == 7).all())
    assert bool((buffer[52:] == 7).all())
    conv_commit(pool, torch.tensor([0, 1]), factors, torch.tensor([40, 3]), validate=False)
    assert bool(torch.isfinite(pool).all())


@pytest.mark.parametrize(("length", "start"), [(3, -3), (3, -(2**31)), (3, 2**31 - 1), (99, 2), (-5, 0)])
def test_a_wrong_ring_stays_in_the_ring(length: int, start: int) -> None:
    tree = TreeBatch.chain(1, 3)
    around = torch.full((6, 4, C), float("nan"))
    ring = around[1:5]
    ring.fill_(1.0)
    index = [torch.full((4,), n, dtype=torch.int32) for n in (length, start)]
    pool = torch.randn(4, C, 3)
    out, factors = tree_conv(
        torch.randn(1, 3, C), WEIGHT, state=pool, slots=torch.tensor([0]), tree=tree,
        pending=ConvPending(ring, *index), validate=False,
    )  # fmt: skip
    assert bool(torch.isfinite(out).all())
    conv_commit(pool, torch.tensor([0]), factors, torch.tensor([0]), validate=False)
    assert bool(torch.isfinite(pool).all())


def test_slots_and_rows_beyond_32_bits() -> None:
    tree = TreeBatch.chain(1, 3)
    near, x = torch.randn(2, C, 3), torch.randn(1, 3, C)
    pool, rows = far((2, C, 3), (2**31, 3, 1)), far((1, 3, C), (0, 2**30, 1))
    pool.copy_(near)
    rows.copy_(x)
    slots, accepted = torch.tensor([1]), torch.tensor([2])
    want, factors = tree_conv(x, WEIGHT, state=near, slots=slots, tree=tree)
    out, far_factors = tree_conv(rows, WEIGHT, state=pool, slots=slots, tree=tree)
    assert_same_bits("output", out, want)
    conv_commit(near, slots, factors, accepted)
    conv_commit(pool, slots, far_factors, accepted)
    assert_same_bits("state", pool, near)


def test_channels_beyond_32_bits_are_refused() -> None:
    tree, x, slots = TreeBatch.chain(1, 3), torch.randn(1, 3, C), torch.tensor([0])
    pool = far((1, C, 3), (0, 113025456, 1))
    with pytest.raises(ValueError, match=r"^state: strides .*give a copy \(state\.contiguous\(\)\)"):
        tree_conv(x, WEIGHT, state=pool, slots=slots, tree=tree)
    with pytest.raises(ValueError, match=r"^weight: strides"):
        tree_conv(x, far((C, 4), (113025456, 1)), state=torch.zeros(1, C, 3), slots=slots, tree=tree)
    with pytest.raises(ValueError, match=r"^pools: strides"):
        conv_commit(pool, slots, ConvFactors(x, 4, tree), torch.tensor([2]))


def test_layers_of_different_channels_are_launched_apart() -> None:
    tree, slots, accepted = TreeBatch.chain(1, 5), torch.tensor([1]), torch.tensor([2])
    x, pool = torch.randn(1, 5, 48), torch.randn(3, 48, 3)
    parts = [slice(0, 16), slice(16, 28), slice(32, 48)]
    pools, factors = [pool[:, part] for part in parts], [ConvFactors(x[..., part], 4, tree) for part in parts]
    want = pool.clone()
    for part, one in zip(parts, factors, strict=True):
        conv_commit(want[:, part], slots, one, accepted)
    conv_commit(pools, slots, factors, accepted)
    assert_same_bits("state", pool, want)
