"""The layer composed of the library's operations: padding, packed trees, layouts, rounds, errors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from bole_testing.cases.base import NAN, random_parents
from bole_testing.close import assert_close, assert_same_bits
from bole_testing.conv import conv_tree

from bole_runtime import TreeBatch, set_backend
from bole_runtime.layers import GatedDeltaNet, commit_layers

HK, HV, DK, DV, W = 2, 4, 8, 12, 4
CHANNELS = 2 * HK * DK + HV * DV


def layer(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> GatedDeltaNet:
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen).to(dtype)

    made = {
        "conv_weight": normal(CHANNELS, W), "conv_bias": normal(CHANNELS), "A_log": normal(HV), "dt_bias": normal(HV),
        "norm_weight": normal(DV),
    }  # fmt: skip
    return GatedDeltaNet(HK, HV, DK, DV, **{**made, **changes})


def inputs(*lead: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    wide = CHANNELS + HV * DV
    return torch.randn(*lead, wide, generator=gen).to(dtype), torch.randn(*lead, 2 * HV, generator=gen).to(dtype)


def pools(slots: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(2)
    return {
        "conv_state": torch.randn(slots, CHANNELS, W - 1, generator=gen).to(dtype),
        "state": torch.randn(slots, HV, DV, DK, generator=gen).to(dtype),
    }


def test_against_the_reference_backend_in_double() -> None:
    rng = random.Random(1)
    tree = conv_tree([random_parents(rng, 9), random_parents(rng, 9, padding=0.3)], False)
    made, both = inputs(2, 9), pools(3)
    out, _ = layer().verify(*made, **both, slots=torch.tensor([2, 0]), tree=tree)
    set_backend("reference")
    try:
        wide = layer()
        names = ("conv_weight", "conv_bias", "A_log", "dt_bias", "norm_weight")
        wide = layer(**{name: getattr(wide, name).double() for name in names})
        doubled = {name: pool.double() for name, pool in both.items()}
        want, _ = wide.verify(*(t.double() for t in made), **doubled, slots=torch.tensor([2, 0]), tree=tree)
    finally:
        set_backend(None)
    assert_close("output", out, want, 5e-6)


def test_padding_reads_nothing() -> None:
    tree = conv_tree([[-1, 0, -2, 1]] * 3, False)
    qkvz, ba = inputs(3, 4)
    for t in (qkvz, ba):
        t[1:] = NAN
        t[0, 2] = NAN
    both = pools(3)
    for pool in both.values():
        pool[:2] = NAN
    before = {name: pool.clone() for name, pool in both.items()}
    slots = torch.tensor([2, -1, -1])
    out, factors = layer().verify(qkvz, ba, **both, slots=slots, tree=tree)
    assert bool(torch.isfinite(out).all())
    assert bool((out[1:] == 0).all())
    assert bool((out[0, 2] == 0).all())
    commit_layers([both["conv_state"]], [both["state"]], slots, [factors], torch.tensor([3, 3, 3]))
    for name, pool in both.items():
        assert_same_bits(name, pool[:2], before[name][:2])
        assert bool(torch.isfinite(pool[2]).all())
        assert not torch.equal(pool[2], before[name][2])


def test_packed_is_dense() -> None:
    rng = random.Random(2)
    rows = [random_parents(rng, n) for n in (6, 2, 4)]
    dense, packed = conv_tree(rows, False), conv_tree(rows, True)
    qkvz, ba = inputs(3, 6)
    flat = [torch.full((packed.max_total, t.shape[-1]), NAN) for t in (qkvz, ba)]
    for t, source in zip(flat, (qkvz, ba), strict=True):
        t[:12] = torch.cat([source[b, : len(row)] for b, row in enumerate(rows)])
    slots = torch.tensor([1, 0, 2])
    out, _ = layer().verify(qkvz, ba, **pools(3), slots=slots, tree=dense)
    got, _ = layer().verify(*flat, **pools(3), slots=slots, tree=packed)
    assert_close("output", got[:12], torch.cat([out[b, : len(row)] for b, row in enumerate(rows)]), 1e-6)


def test_layouts_hold_the_same_numbers() -> None:
    tree = TreeBatch.chain(1, 5)
    qkvz, ba = inputs(1, 5)
    q, k, v, z = qkvz.split([HK * DK, HK * DK, HV * DV, HV * DV], -1)
    heads = [t.unflatten(-1, (HK, -1)) for t in (q, k, v, z)]
    mixed = torch.cat(heads, -1).flatten(-2)
    gates = torch.cat([t.unflatten(-1, (HK, -1)) for t in ba.chunk(2, -1)], -1).flatten(-2)
    slots = torch.tensor([0])
    out, factors = layer().verify(qkvz, ba, **pools(1), slots=slots, tree=tree)
    other, copied = layer(layout="key_heads").verify(mixed, gates, **pools(1), slots=slots, tree=tree)
    assert_same_bits("output", other, out)
    assert factors.conv.x.data_ptr() == qkvz.data_ptr()
    assert_same_bits("raw inputs", copied.conv.x, factors.conv.x.contiguous())


def test_rounds_are_one_long_chain() -> None:
    made, slots = layer(), torch.tensor([0])
    both, rng, taken, got = pools(1), random.Random(3), [], []
    start = {name: pool.clone() for name, pool in both.items()}
    for step in range(4):
        tree = conv_tree([random_parents(rng, 6, roots=0.0)], False)
        qkvz, ba = inputs(1, 6, seed=10 + step)
        out, factors = made.verify(qkvz, ba, **both, slots=slots, tree=tree)
        node = rng.randrange(6)
        path = tree.path(0, node)
        taken.append((qkvz[:, path], ba[:, path]))
        got.append(out[:, path])
        commit_layers([both["conv_state"]], [both["state"]], slots, [factors], torch.tensor([node]))
    chain = [torch.cat(parts, 1) for parts in zip(*taken, strict=True)]
    tree = TreeBatch.chain(1, chain[0].shape[1])
    want, factors = made.verify(*chain, **start, slots=slots, tree=tree)
    assert_close("output", torch.cat(got, 1), want, 1e-5)
    commit_layers([start["conv_state"]], [start["state"]], slots, [factors], torch.tensor([tree.max_nodes - 1]))
    assert_same_bits("convolution state", both["conv_state"], start["conv_state"])
    assert_close("state", both["state"], start["state"], 1e-5)


def test_norm() -> None:
    x, z = torch.randn(3, HV, DV).bfloat16(), torch.randn(3, HV, DV).bfloat16()
    for name, gate in (("silu", torch.nn.functional.silu), ("sigmoid", torch.sigmoid)):
        made = layer(norm_gate=name)
        wide = x.double()
        wide = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * made.norm_weight.double()
        # Rounded to bf16 twice, each time by up to 2^-8.
        assert_close(name, made.norm(x, z), wide * gate(z.double()), 2**-7)
        assert made.norm(x, z).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "rows"}, r"^layout: 'rows' is not allowed; allowed: parts, key_heads"),
        ({"norm_gate": "relu"}, r"^norm_gate: 'relu' is not allowed"),
        ({"conv_weight": torch.zeros(3, 4)}, rf"^conv_weight: expected shape \({CHANNELS}, W\), got \(3, 4\)"),
        ({"A_log": torch.zeros(3)}, rf"^A_log: expected shape \({HV},\)"),
        ({"norm_weight": torch.zeros(HV, DV)}, rf"^norm_weight: expected shape \({DV},\)"),
    ],
)
def test_bad_parameters(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(**changes)


def test_bad_columns_and_counts() -> None:
    tree, slots = TreeBatch.chain(1, 2), torch.tensor([0])
    qkvz, ba = inputs(1, 2)
    with pytest.raises(ValueError, match=r"^qkvz: expected \d+ columns"):
        layer().verify(qkvz[..., 1:], ba, **pools(1), slots=slots, tree=tree)
    with pytest.raises(ValueError, match=r"^ba: expected 8 columns"):
        layer().verify(qkvz, ba[..., 1:], **pools(1), slots=slots, tree=tree)
    with pytest.raises(ValueError, match=r"^value_heads: 3 is not a positive multiple of key_heads = 2"):
        GatedDeltaNet(2, 3, DK, DV, *(torch.zeros(1) for _ in range(4)))
    with pytest.raises(TypeError, match=r"^dk: expected an int, got float"):
        GatedDeltaNet(2, 4, 8.0, DV, *(torch.zeros(1) for _ in range(4)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^conv_pools, pools, factors: expected the same number of layers"):
        commit_layers([], [torch.zeros(1)], slots, [], slots)


def test_a_refused_commit_moves_neither_state() -> None:
    qkvz, ba = inputs(1, 3)
    both, slots, tree = pools(2), torch.tensor([0]), TreeBatch.chain(1, 3)
    _, factors = layer().verify(qkvz, ba, **both, slots=slots, tree=tree)
    before = {name: pool.clone() for name, pool in both.items()}
    conv, state, accepted = both["conv_state"], both["state"], torch.tensor([2])
    with pytest.raises(ValueError, match="precision: 'exact' is not allowed"):
        commit_layers([conv], [state], slots, [factors], accepted, precision="exact")
    with pytest.raises(ValueError, match="pool: expected shape"):
        commit_layers([conv], [state[:, :1]], slots, [factors], accepted)
    with pytest.raises(ValueError, match="pool: two layers share a pool"):
        commit_layers([conv, conv.clone()], [state, state], slots, [factors] * 2, accepted)
    with pytest.raises(ValueError, match="pools: two layers share a pool"):
        commit_layers([conv, conv], [state, state.clone()], slots, [factors] * 2, accepted)
    with pytest.raises(TypeError, match=r"factors\[0\]: expected a LayerFactors, got int"):
        commit_layers([conv], [state], slots, [1], accepted)  # type: ignore[list-item]
    for name, pool in both.items():
        assert_same_bits(name, pool, before[name])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"A_log": [0.0] * HV}, TypeError, "A_log: expected a torch.Tensor, got list"),
        ({"conv_bias": torch.zeros(3)}, ValueError, "conv_bias: expected shape"),
        ({"norm_weight": torch.zeros(DV, 1)}, ValueError, "norm_weight: expected shape"),
    ],
)
def test_parameters_of_a_wrong_type(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        layer(**changes)


def test_inputs_of_a_wrong_type() -> None:
    qkvz, ba = inputs(1, 3)
    more: dict[str, Any] = {**pools(2), "slots": torch.tensor([0]), "tree": TreeBatch.chain(1, 3)}
    with pytest.raises(TypeError, match=r"^qkvz: expected a torch\.Tensor, got list"):
        layer().verify([1], ba, **more)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^ba: expected 8 columns, got shape \(\)"):
        layer().verify(qkvz, torch.tensor(1.0), **more)
