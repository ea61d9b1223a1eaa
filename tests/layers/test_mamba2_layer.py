"""The Mamba2 layer: padding, packed trees, the norm, errors. Its numbers are compared with transformers beside this."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from bole_testing.cases.base import NAN, random_parents
from bole_testing.close import assert_close, assert_same_bits
from bole_testing.conv import conv_tree

from bole_runtime import TreeBatch
from bole_runtime.layers import Mamba2, commit_layers

HEADS, GROUPS, P, N, W = 4, 2, 12, 8, 4
CHANNELS = HEADS * P + 2 * GROUPS * N
COLUMNS = HEADS * P + CHANNELS + HEADS


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(**changes: Any) -> Mamba2:
    made = {
        "conv_weight": normal(CHANNELS, W), "conv_bias": normal(CHANNELS, seed=1), "A_log": normal(HEADS, seed=2),
        "dt_bias": normal(HEADS, seed=3), "D": normal(HEADS, seed=4), "norm_weight": normal(HEADS * P, seed=5),
    }  # fmt: skip
    return Mamba2(HEADS, GROUPS, P, N, **{**made, **changes})


def pools(slots: int) -> dict[str, torch.Tensor]:
    return {"conv_state": normal(slots, CHANNELS, W - 1, seed=6), "state": normal(slots, HEADS, P, N, seed=7)}


def test_padding_reads_nothing() -> None:
    tree = conv_tree([[-1, 0, -2, 1]] * 3, False)
    x = normal(3, 4, COLUMNS, seed=8)
    x[1:] = NAN
    x[0, 2] = NAN
    both = pools(3)
    for pool in both.values():
        pool[:2] = NAN
    before = {name: pool.clone() for name, pool in both.items()}
    slots = torch.tensor([2, -1, -1])
    out, factors = layer().verify(x, **both, slots=slots, tree=tree)
    assert bool(torch.isfinite(out).all())
    assert bool((out[1:] == 0).all())
    assert bool((out[0, 2] == 0).all())
    assert factors.conv.x.data_ptr() == x[..., HEADS * P :].data_ptr()
    commit_layers([both["conv_state"]], [both["state"]], slots, [factors], torch.tensor([3, 3, 3]))
    for name, pool in both.items():
        assert_same_bits(name, pool[:2], before[name][:2])
        assert bool(torch.isfinite(pool[2]).all())
        assert not torch.equal(pool[2], before[name][2])


def test_packed_is_dense() -> None:
    rng = random.Random(2)
    rows = [random_parents(rng, n) for n in (6, 2, 4)]
    x = normal(3, 6, COLUMNS, seed=8)
    flat = torch.full((14, COLUMNS), NAN)
    flat[:12] = torch.cat([x[b, : len(row)] for b, row in enumerate(rows)])
    slots = torch.tensor([1, 0, 2])
    out, _ = layer(norm_groups=2).verify(x, **pools(3), slots=slots, tree=conv_tree(rows, False))
    got, _ = layer(norm_groups=2).verify(flat, **pools(3), slots=slots, tree=conv_tree(rows, True))
    assert_close("output", got[:12], torch.cat([out[b, : len(row)] for b, row in enumerate(rows)]), 1e-6)


def test_norm_by_groups() -> None:
    made = layer(norm_groups=2, norm_weight=torch.ones(HEADS * P))
    out, z = normal(3, HEADS * P), normal(3, HEADS * P, seed=1)
    got = made.norm(out, z).unflatten(-1, (2, -1))
    assert_close("norms", got.square().mean(-1), torch.ones(3, 2), 1e-4)
    want = (out * torch.nn.functional.silu(z)).unflatten(-1, (2, -1))
    assert_close("direction", got / got.norm(dim=-1, keepdim=True), want / want.norm(dim=-1, keepdim=True), 1e-6)


def test_errors() -> None:
    for changes, message in (
        ({"norm_groups": 5}, r"^norm_groups: 5 does not divide HV P = 48"),
        ({"conv_weight": torch.zeros(3, 4)}, rf"^conv_weight: expected shape \({CHANNELS}, W\), got \(3, 4\)"),
        ({"D": torch.zeros(HEADS, P)}, rf"^D: expected shape \({HEADS},\)"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(**changes)
    with pytest.raises(ValueError, match=r"^heads: 3 is not a positive multiple of groups = 2"):
        Mamba2(3, 2, P, N, *(torch.zeros(1) for _ in range(6)))
    tree = TreeBatch.chain(1, 2)
    with pytest.raises(ValueError, match=rf"^zxbcdt: expected {COLUMNS} columns"):
        layer().verify(torch.zeros(1, 2, COLUMNS + 1), **pools(1), slots=torch.tensor([0]), tree=tree)
