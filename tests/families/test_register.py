"""A family of one's own, through the public seam alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bole_testing.cases.base import Setup
from bole_testing.cases.draws import Draw, draws
from bole_testing.families import run_family_draw
from hypothesis import given, settings

from bole_runtime import RecurrenceSpec, commit, get_family, register_family, set_backend, verify
from bole_runtime.families import FAMILIES, KERNEL_FAMILIES, InputSpec
from bole_runtime.families.shared import QKV, node_gate, parameter

ROOT = Path(__file__).resolve().parents[2]
SETUP = Setup(verify, commit, torch.device("cpu"), torch.float32, torch.float32, "lossless")


@pytest.fixture(autouse=True)
def _torch_backend():
    set_backend("torch")
    yield
    set_backend(None)


def _cast(gates, mode, options, dtype):
    return {name: t.to(dtype) for name, t in gates.items()}


def _strange_step(state, q, k, v, gates):
    decay = gates["g"].exp()[:, None, None]
    read = torch.einsum("hvk,hk->hv", state, gates["x"] * gates["y"] * gates["z"][:, None])
    out = None if q is None else torch.einsum("hvk,hk->hv", state, q) + gates["bonus"] * gates["c"][:, None] * v
    erased = read[:, :, None] * (gates["y"] * gates["c"][:, None])[:, None, :]
    written = (gates["c"][:, None] * v * gates["m"])[:, :, None] * (k * gates["x"])[:, None, :]
    return decay * state - erased + written, out


#: Everything at once that no shipped family has: the parent's state is read, a decay a head with an erase before
#: decay, products of several vectors, weights on every key, a skip term with a vector parameter.
STRANGE = RecurrenceSpec(
    name="strange",
    title="Strange",
    decay="head",
    erase="undecayed",
    qk_l2norm=True,
    l2norm_eps=1e-6,
    scale="one",
    inputs=(
        *QKV,
        parameter("g", "ready", "log-decay", role="log_decay"),
        node_gate("x", "erase_key", "ready", "a key, normalised", "dk", heads="HK"),
        node_gate("y", "erase_write", "ready", "another key", "dk"),
        node_gate("z", "erase_gate", "ready", "a gate"),
        node_gate("c", "write_gate", "ready", "a gate"),
        node_gate("m", "write_gate", "ready", "a gate of a value channel", "dv"),
        parameter("bonus", "ready", "of the skip term", "dv"),
    ),
    erase_key=("x", "y", "z"),
    erase_write=("y", "c"),
    write_key=("k", "x"),
    write_value=("c", "v", "m"),
    skip=("bonus", "v", "c"),
    output="before",
    normed=("q", "k", "x"),
)


def test_the_example_of_the_docs() -> None:
    block = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "families.md").read_text(), re.S)[0]
    exec(compile(block, "docs/families.md", "exec"), {"__name__": "example"})
    assert get_family("decayed_delta").decay == "head"
    for seed in range(8):
        draw = Draw(seed, (9, 5), bool(seed % 2), (2, 4), (16, 12), "ready", 0.2, 4 * (seed % 3), False, seed % 4 == 0)
        run_family_draw(SETUP, "decayed_delta", draw)


@given(draw=draws(max_nodes=16, heads=((2, 4), (3, 3)), dims=((16, 16), (12, 20)), modes=("ready",)))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_family_with_everything(draw: Draw) -> None:
    if "strange" not in FAMILIES:
        register_family(STRANGE, SimpleNamespace(step=_strange_step, ready_gates=_cast))
    run_family_draw(SETUP, "strange", draw)


def test_registering() -> None:
    reference = SimpleNamespace(step=_strange_step, ready_gates=_cast)
    assert register_family(STRANGE, reference) is STRANGE
    assert get_family("strange") is STRANGE
    with pytest.raises(ValueError, match="the name 'strange' cannot be registered: there is a family of that name"):
        register_family(STRANGE, reference)


def _with(**changes: object) -> RecurrenceSpec:
    fields = {n: getattr(STRANGE, n) for n, f in RecurrenceSpec.__dataclass_fields__.items() if f.init}
    return RecurrenceSpec(**{**fields, **changes})  # type: ignore[arg-type]


def test_what_cannot_be_registered() -> None:
    reference = SimpleNamespace(step=_strange_step, ready_gates=_cast)
    with pytest.raises(TypeError, match="spec: expected a RecurrenceSpec, got str"):
        register_family("strange", reference)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="reference: SimpleNamespace has no function step"):
        register_family(STRANGE, SimpleNamespace(ready_gates=_cast))
    with pytest.raises(ValueError, match="'mamba1' cannot be registered: its decay depends on channel and state"):
        register_family(_with(name="mamba1"), reference)
    with pytest.raises(ValueError, match="'strange' sets kernels, but no templates come with a registered family"):
        register_family(replace(FAMILIES["lightning"], name="strange"), reference)
    assert "strange" not in FAMILIES
    assert set(KERNEL_FAMILIES) == {n for n, s in FAMILIES.items() if s.kernels}


def _input(name: str, *shape: str, role: str = "erase_key", **changes: object) -> InputSpec:
    fields = {"dtypes": (torch.float32,), "role": role, "mode": "ready", "default": None, "doc": "x"}
    return InputSpec(name, shape, **{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Strange"}, "name: 'Strange' is no lower-case identifier"),
        ({"inputs": STRANGE.inputs[1:]}, "inputs: expected q, k, v first and no name twice"),
        ({"inputs": (*STRANGE.inputs, STRANGE.inputs[-1])}, "inputs: expected q, k, v first and no name twice"),
        ({"inputs": (*STRANGE.inputs, _input("n", "node", "dk"))}, "inputs: n has shape"),
        ({"inputs": (*STRANGE.inputs, _input("n", "node", "HK"))}, "inputs: n has a value a key head"),
        ({"inputs": (*STRANGE.inputs, _input("n", "HV", dtypes=()))}, "inputs: n needs dtypes"),
        ({"inputs": (*STRANGE.inputs, _input("n", "HV", doc=""))}, "inputs: n has no doc"),
        ({"inputs": (*STRANGE.inputs, _input("n", "node", "HV", default=0.0))}, "inputs: n is given per node"),
        ({"inputs": (*STRANGE.inputs, _input("n", "node", "HV", mode="raw"))}, "make_ready: expected a function for"),
        ({"decay": "channel"}, "decay: 'channel' takes one input of shape"),
        ({"decay": "matrix"}, "decay: 'matrix' is none of none, head, scalar, channel"),
        ({"decay": "none"}, "decay: 'none' takes nothing of role 'log_decay'"),
        ({"erase": "none"}, "erase_key, erase_write: needed unless erase is 'none'"),
        ({"erase_key": ()}, "erase_key, erase_write: needed unless erase is 'none'"),
        ({"erase_sign": 2.0}, "erase_sign: 2.0 is neither -1.0 nor 1.0"),
        ({"erase_key": ("nothing",)}, "erase_key: 'nothing' is no input that a ready call has per node"),
        ({"erase_key": ("z",)}, r"erase_key: none of \('z',\) is a vector of dk"),
        ({"write_key": ("k", "m")}, "write_key: 'm' is a vector of dv, expected dk"),
        ({"write_value": ("v", "bonus")}, "write_value: 'bonus' is no input that a ready call has per node"),
        ({"kernels": True}, "kernels: the templates have no such gates or updates"),
        ({"normed": ("q", "nothing")}, r"normed: \['nothing'\] are no inputs"),
    ],
)
def test_declarations_that_contradict_themselves(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"family '[sS]trange': {message}"):
        _with(**changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("lightning", {"write_key": ("k", "k")}, "kernels: the templates write k"),
        ("lightning", {"output": "before"}, "kernels: the templates write k, read the new state"),
        ("mamba2", {"write_value": ("v",)}, "kernels: the templates know a log-decay and a write gate a node"),
        ("mamba2", {"gate_formula": ""}, "gate_formula: needed for kernels with raw gates"),
        ("lightning", {"gate_formula": "softplus_step"}, "gate_formula: needed for kernels with raw gates"),
        ("gdn2", {"write_value": ("v",)}, "kernels: the templates know a log-decay and a write gate a node"),
        ("gdn2", {"erase_sign": 1.0}, "kernels: the templates have no such gates or updates"),
        ("comba", {"erase_key": ("p",)}, "kernels: the templates have no such gates or updates"),
        ("rwkv7", {"normed": ("q", "k", "a")}, "kernels: the templates have no such gates or updates"),
        ("rwkv7", {"unit_gate": "a"}, "unit_gate: 'a' is no raw gate"),
    ],
)
def test_kernels_of_what_the_templates_do_not_have(name: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"family '{name}': {message}"):
        replace(FAMILIES[name], **changes)
