"""Numeric cases of every family: extreme decays, degenerate keys, gates at their ends, inputs near overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bole_testing.cases.base import Inputs, Setup, chain_tree, dense_tree, leaves
from bole_testing.cases.checks import check_commit, check_verify
from bole_testing.close import assert_close
from bole_testing.families import family_inputs

from bole_runtime import commit, set_backend, verify
from bole_runtime.families import FAMILIES, RecurrenceSpec, get_family

FP32 = Setup(verify, commit, torch.device("cpu"), torch.float32, torch.float32, "lossless")
BRANCHED = [[-1, 0, 0, 1, 1, 2, 5, 6, 3, 4, 9, 10, 0, 12, 13, 14]]
EVERY = sorted(FAMILIES)
PER_NODE_DECAY = [n for n in EVERY if FAMILIES[n].decay in ("scalar", "channel")]
CHANNEL = [n for n in EVERY if FAMILIES[n].decay == "channel"]
DELTA = ["comba", "deltanet", "gdn", "gdn2", "kda"]
NORMED = [n for n in EVERY if FAMILIES[n].qk_l2norm]


@pytest.fixture(autouse=True)
def _torch_backend():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    set_backend("torch")
    yield
    set_backend(None)
    torch.set_num_threads(threads)


def _both(inputs: Inputs, setup: Setup = FP32, sequential: bool = False) -> torch.Tensor:
    factors = check_verify(setup, inputs, sequential=sequential)
    return check_commit(setup, inputs, factors, leaves(inputs.tree), sequential=sequential)


def _decay_of(spec: RecurrenceSpec, inputs: Inputs) -> torch.Tensor:
    assert spec.log_decay is not None
    decay: torch.Tensor = inputs.gates[spec.log_decay.name]
    return decay


def _write_gates(spec: RecurrenceSpec, inputs: Inputs) -> list[torch.Tensor]:
    return [inputs.gates[i.name] for i in spec.node_gates("ready") if i.role in ("write_gate", "erase_gate")]


@pytest.mark.parametrize("name", PER_NODE_DECAY)
@pytest.mark.parametrize("value", [0.0, -3.0, -6.0, -20.0, -1000.0, float("-inf")])
def test_constant_log_decay(name: str, value: float) -> None:
    inputs = family_inputs(FP32, get_family(name), chain_tree(FP32, 1, 16))
    _decay_of(get_family(name), inputs).fill_(value)
    _both(inputs)


@pytest.mark.parametrize("name", PER_NODE_DECAY)
def test_mixed_log_decay(name: str) -> None:
    values = torch.tensor([0.0, -3.0, -6.0, -20.0, -50.0, -1000.0])
    for seed, rows in enumerate([[list(range(-1, 15))], BRANCHED]):
        inputs = family_inputs(FP32, get_family(name), dense_tree(FP32, rows), seed=seed)
        decay = _decay_of(get_family(name), inputs)
        pick = torch.randint(0, len(values), decay.shape, generator=torch.Generator().manual_seed(seed))
        decay.copy_(values[pick])
        _both(inputs)


@pytest.mark.parametrize("name", PER_NODE_DECAY)
def test_one_huge_log_decay_above_a_chain(name: str) -> None:
    inputs = family_inputs(FP32, get_family(name), chain_tree(FP32, 1, 16))
    decay = _decay_of(get_family(name), inputs)
    decay.fill_(-0.0123)
    decay[:, 1] = -1000.0
    _both(inputs)


@pytest.mark.parametrize("name", CHANNEL)
def test_channels_at_0_and_at_minus_50_side_by_side(name: str) -> None:
    # Over 16 nodes the exponents differ by 800: a reference point shared by the channels would overflow.
    inputs = family_inputs(FP32, get_family(name), dense_tree(FP32, BRANCHED))
    decay = _decay_of(get_family(name), inputs)
    decay.zero_()
    decay[..., ::2] = -50.0
    decay[:, 7, :, 5] = -1000.0
    _both(inputs)


@pytest.mark.parametrize("name", ["lightning", "retention"])
def test_fixed_decay_of_every_size(name: str) -> None:
    spec = get_family(name)
    inputs = family_inputs(
        FP32, spec, dense_tree(FP32, BRANCHED), gates={"g": torch.tensor([0.0, -1e-6, -3.0, -1000.0])}
    )
    _both(inputs)


@pytest.mark.parametrize("name", [*DELTA, "rwkv7"])
@pytest.mark.parametrize("nodes", [16, 64, 128])
@pytest.mark.parametrize("gate", [1.0, 2.0])
def test_repeated_keys(name: str, nodes: int, gate: float) -> None:
    spec = get_family(name)
    inputs = family_inputs(FP32, spec, chain_tree(FP32, 1, nodes), heads=(1, 2), dims=(24, 20))
    inputs.k.copy_(inputs.k[:, :1].clone().expand_as(inputs.k))
    if name == "rwkv7":
        unit = inputs.k / inputs.k.norm(dim=-1, keepdim=True)
        inputs.k.copy_(unit)
        inputs.gates["a"].copy_(-unit.expand_as(inputs.gates["a"]))
        inputs.gates["b"].copy_(gate * unit.expand_as(inputs.gates["b"]))
    for t in _write_gates(spec, inputs):
        t.fill_(gate)
    if "p" in inputs.gates:
        inputs.gates["p"].copy_(inputs.k)
    if spec.log_decay is not None:
        _decay_of(spec, inputs).zero_()
    _both(inputs, sequential=True)


@pytest.mark.parametrize("name", EVERY)
def test_without_writes_the_state_only_decays(name: str) -> None:
    spec = get_family(name)
    inputs = family_inputs(FP32, spec, chain_tree(FP32, 1, 5))
    # Gates of 0 in the delta rules; nothing to write elsewhere, and for DPLR nothing to move.
    gates = _write_gates(spec, inputs) or [inputs.v]
    for t in [*gates, *([inputs.gates["a"]] if name == "rwkv7" else [])]:
        t.zero_()
    factors = check_verify(FP32, inputs)
    pool = check_commit(FP32, inputs, factors, [4])
    slot = int(inputs.slots[0])
    before = inputs.state[slot].double()
    if spec.decay == "none":
        assert torch.equal(pool[slot], inputs.state[slot])
        return
    decay = _decay_of(spec, inputs).double()
    total = 5 * decay if spec.decay == "head" else decay[0].sum(0)
    scale = total.exp()[:, None, :] if spec.decay == "channel" else total.exp()[:, None, None]
    assert_close("decayed state", pool[slot], scale * before, FP32.state_bound)


@pytest.mark.parametrize("name", EVERY)
def test_zero_queries_and_zero_keys(name: str) -> None:
    spec = get_family(name)
    inputs = family_inputs(FP32, spec, dense_tree(FP32, BRANCHED))
    inputs.q.zero_()
    gates = {n: t for n, t in inputs.gates.items() if n not in spec.skip}
    out, _ = verify(inputs.q, inputs.k, inputs.v, **{**inputs.arguments, "gates": gates})
    assert bool((out == 0).all())
    inputs = family_inputs(FP32, spec, dense_tree(FP32, BRANCHED))
    inputs.k.zero_()
    _both(inputs)


@pytest.mark.parametrize("name", NORMED)
def test_tiny_keys_meet_the_epsilon_inside_the_root(name: str) -> None:
    inputs = family_inputs(FP32, get_family(name), chain_tree(FP32, 1, 6))
    for t in (inputs.k, *([inputs.gates["p"]] if "p" in inputs.gates else [])):
        t.copy_(t / t.norm(dim=-1, keepdim=True) * 1e-3)
    _both(inputs)


@pytest.mark.parametrize("name", NORMED)
@pytest.mark.parametrize(("dtype", "top"), [(torch.float16, 65504.0), (torch.bfloat16, 3e38)])
def test_inputs_near_the_largest_finite_value(name: str, dtype: torch.dtype, top: float) -> None:
    setup = Setup(verify, commit, torch.device("cpu"), dtype, torch.float32, "lossless")
    inputs = family_inputs(setup, get_family(name), chain_tree(setup, 1, 4), dims=(16, 16))
    for t in (inputs.q, inputs.k):
        t.copy_((torch.sign(t.float()) * top).to(dtype))
    _both(inputs, setup)


@pytest.mark.parametrize("name", [n for n in EVERY if "raw" in FAMILIES[n].modes])
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16])
def test_raw_gates_of_every_size(name: str, gate_dtype: torch.dtype) -> None:
    # Logits from -100 to 60, and fp32 ones that are one value in bf16.
    spec = get_family(name)
    values = torch.tensor([-100.0, -30.0, -5.0, 0.0, 5.0, 19.9, 6.01, 6.02])
    inputs = family_inputs(FP32, spec, chain_tree(FP32, 1, 8), mode="raw")
    gates: dict[str, Any] = dict(inputs.gates)
    for i in spec.node_gates("raw"):
        if i.role != "erase_key":
            x = values.reshape(1, 8, *[1] * (len(i.shape) - 1)).expand_as(gates[i.name])
            gates[i.name] = x.to(gate_dtype).contiguous()
    if "A_log" in gates:
        gates["A_log"] = torch.full_like(gates["A_log"], -4.0)
    _both(inputs.replace(gates=gates))


def test_every_option() -> None:
    cases = {
        "gdn": {"beta_scale": 2.0},
        "deltanet": {"beta_scale": 2.0},
        "comba": {"beta_scale": 0.5},
        "kda": {"lower_bound": -5.0, "beta_scale": 2.0},
        "gdn2": {"erase_scale": 2.0},
        "mamba2": {"dt_min": 0.05, "dt_max": 0.5},
        "simple_gla": {"normalizer": 4.0},
        "gla": {"normalizer": 1.0},
    }
    assert cases.keys() == {n for n in EVERY if "raw" in FAMILIES[n].modes and FAMILIES[n].options("raw")}
    for name, options in cases.items():
        spec = get_family(name)
        assert options.keys() == {i.name for i in spec.options("raw")}
        plain = family_inputs(FP32, spec, chain_tree(FP32, 2, 8), mode="raw")
        changed = family_inputs(FP32, spec, chain_tree(FP32, 2, 8), mode="raw", gates=options)
        _both(changed)
        before, after = (verify(x.q, x.k, x.v, **x.arguments)[0] for x in (plain, changed))
        assert (before - after).norm() > 1e-2 * before.norm(), f"{name}: the options change nothing"


def test_optional_parameters_may_be_missing() -> None:
    for name, left_out in (("mamba2", ("dt_bias", "D")), ("kda", ("dt_bias",)), ("gdn2", ("dt_bias",))):
        inputs = family_inputs(FP32, get_family(name), chain_tree(FP32, 1, 8), mode="raw")
        zero = {n: torch.zeros_like(t) if n in left_out else t for n, t in inputs.gates.items()}
        without = {n: t for n, t in inputs.gates.items() if n not in left_out}
        _both(inputs.replace(gates=without))
        a, b = (verify(inputs.q, inputs.k, inputs.v, **{**inputs.arguments, "gates": g})[0] for g in (zero, without))
        assert torch.equal(a, b)


def test_the_bounded_gate_of_kda_stays_above_its_bound() -> None:
    spec = get_family("kda")
    raw = {"f": torch.linspace(-200, 200, 64).reshape(1, 1, 1, 64), "b": torch.zeros(1, 1, 1), "A_log": torch.zeros(1)}
    g = spec.make_ready["raw"](raw, {"lower_bound": -5.0, "beta_scale": 1.0})["g"]
    assert bool(((g >= -5.0) & (g <= 0)).all())
    assert g.min().item() == pytest.approx(-5.0)


@pytest.mark.parametrize("name", EVERY)
def test_strict_past_only(name: str) -> None:
    # What a sibling or a descendant holds never reaches a node, however large.
    spec = get_family(name)
    inputs = family_inputs(FP32, spec, dense_tree(FP32, [[-1, 0, 0, 1, 2, 3]]))
    out, _ = verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
    for t in (inputs.q, inputs.k, inputs.v):
        t[:, 2] = t[:, 2] * 1e3 + 7
        t[:, 4] = -t[:, 4]
    changed, _ = verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
    for node in (0, 1, 3, 5):
        assert_close(f"node {node}", changed[:, node], out[:, node], 1e-6)
    assert (changed[:, 4] - out[:, 4]).norm() > 1e-3
