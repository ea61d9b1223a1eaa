"""Inputs are fresh, share nothing, and their two gate forms are equal."""

from __future__ import annotations

import pytest
import torch

from bole_codegen.measure import input_bytes_per_layer, make_verify_inputs, ready_gates
from bole_runtime.families import KERNEL_FAMILIES, get_family
from bole_runtime.kernels.problem import Problem

PROBLEM = Problem("verify", "gdn", 16, 8, 2, "bf16", "fp32", "raw", "fast", 16, 8, 0, 8)


def draw(problem: Problem = PROBLEM, **kwargs: object):
    return make_verify_inputs(problem, 2, 4, 3, 9, device="cpu", **kwargs)  # type: ignore[arg-type]


def test_shapes_and_dtypes() -> None:
    x = draw(layers=2, shape="2,2,2")
    layer = x.layers[0]
    assert layer.q.shape == layer.k.shape == (3, 9, 2, 16)
    assert layer.v.shape == (3, 9, 4, 8)
    assert layer.state.shape == (5, 4, 8, 16)
    assert {n: tuple(t.shape) for n, t in layer.raw.items()} == {
        "a": (3, 9, 4), "b": (3, 9, 4), "A_log": (4,), "dt_bias": (4,)
    }  # fmt: skip
    assert (layer.q.dtype, layer.raw["a"].dtype, layer.raw["A_log"].dtype) == (
        torch.bfloat16, torch.bfloat16, torch.float32
    )  # fmt: skip
    assert x.parents.dtype == x.slots.dtype == torch.int32
    assert x.depth == 3
    assert x.workload.gate_mode == "raw"


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_state_dtype_follows_the_problem(name: str, dtype: torch.dtype) -> None:
    assert draw(PROBLEM.replace(state_dtype=name)).layers[0].state.dtype == dtype


def test_slots_are_distinct_and_in_the_pool() -> None:
    seen = set()
    for seed in range(8):
        slots = draw(seed=seed).slots.tolist()
        assert len(set(slots)) == 3
        assert set(slots) <= set(range(5))
        seen.add(tuple(slots))
    assert len(seen) > 1


def test_layers_share_no_memory_and_no_values() -> None:
    a, b = draw(layers=2).layers
    for one, two in [(a.q, b.q), (a.v, b.v), (a.state, b.state), (a.raw["a"], b.raw["a"])]:
        assert one.data_ptr() != two.data_ptr()
        assert not torch.equal(one, two)


def test_seeds_are_reproducible_and_differ() -> None:
    assert torch.equal(draw(seed=5).layers[0].v, draw(seed=5).layers[0].v)
    assert not torch.equal(draw(seed=5).layers[0].v, draw(seed=6).layers[0].v)


def test_ready_gates_equal_the_raw_ones() -> None:
    layer = draw().layers[0]
    x = layer.raw["a"].double() + layer.raw["dt_bias"].double()
    want = -layer.raw["A_log"].double().exp() * torch.nn.functional.softplus(x)
    torch.testing.assert_close(layer.ready["g"].double(), want, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(layer.ready["beta"], layer.raw["b"].float().sigmoid(), rtol=1e-6, atol=0)
    assert layer.gates("raw") is layer.raw
    with pytest.raises(ValueError, match="gate mode"):
        layer.gates("cooked")


def test_ready_gates_are_finite_at_the_ends() -> None:
    big = torch.tensor([-3e38, -100.0, 0.0, 100.0, 1e4])
    out = ready_gates({"a": big, "b": big, "A_log": torch.zeros(5), "dt_bias": torch.zeros(5)}, beta_scale=2.0)
    assert torch.isfinite(out["g"]).all()
    assert (out["g"] <= 0).all()
    assert out["g"][-1] == -1e4
    assert out["beta"][-1] == 2.0


def test_decay_spans_long_and_short_memory() -> None:
    g = make_verify_inputs(PROBLEM, 16, 32, 4, 16, device="cpu").layers[0].ready["g"]
    assert (g < 0).all()
    assert g.quantile(0.9) > -0.05
    assert g.quantile(0.1) < -0.2


def test_bad_sizes_name_the_argument() -> None:
    with pytest.raises(ValueError, match="multiple of key heads"):
        make_verify_inputs(PROBLEM, 2, 3, 1, 4, device="cpu")
    with pytest.raises(ValueError, match="batch, layers"):
        make_verify_inputs(PROBLEM, 2, 4, 0, 4, device="cpu")


def test_memory_estimate_covers_what_is_allocated() -> None:
    x = draw()
    layer = x.layers[0]
    tensors = [layer.q, layer.k, layer.v, layer.state, *layer.raw.values(), *layer.ready.values()]
    used = sum(t.numel() * t.element_size() for t in tensors)
    assert used <= input_bytes_per_layer(x.workload) + 64


@pytest.mark.parametrize("family", [name for name in KERNEL_FAMILIES if name != "gdn"])
def test_gates_of_other_families_are_those_of_their_declaration(family: str) -> None:
    spec = get_family(family)
    mode = spec.modes[-1]
    layer = draw(PROBLEM.replace(family=family, gate_mode=mode)).layers[0]
    for m in spec.modes:
        assert layer.gates(m).keys() == {i.name for i in spec.gates(m) if i.shape}
    if mode == "raw":
        options = {i.name: i.default for i in spec.options("raw")}
        for name, gate in spec.make_ready["raw"](layer.raw, options).items():
            assert torch.equal(layer.ready[name], gate.float())
    assert all(bool((layer.ready[i.name] <= 0).all()) for i in spec.gates("ready") if i.role == "log_decay")
