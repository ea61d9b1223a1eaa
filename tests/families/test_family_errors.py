"""Bad input for families with vectors, parameters and floats of their own: refused by name before any work."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from bole_testing.cases.base import Setup, dense_tree
from bole_testing.families import family_inputs, family_pending

from bole_runtime import Factors, backends, commit, set_backend, verify
from bole_runtime.families import FAMILIES, get_family

SETUP = Setup(verify, commit, torch.device("cpu"), torch.float32, torch.float32, "lossless")
TREE = dense_tree(SETUP, [[-1, 0, 0, 1], [-1, 0, 1, 2]])


@pytest.fixture(autouse=True)
def _torch_backend():
    set_backend("torch")
    yield
    set_backend(None)


def call(name: str, mode: str, gates: dict[str, Any] | None = None, drop: str = "", **changes: Any) -> Any:
    """Verify random inputs of a family with some of them changed or left out."""
    inputs = family_inputs(SETUP, get_family(name), TREE, mode=mode)
    given = {n: t for n, t in {**inputs.gates, **(gates or {})}.items() if n != drop}
    return verify(inputs.q, inputs.k, inputs.v, **{**inputs.arguments, "gates": given, **changes})


@pytest.mark.parametrize(
    ("name", "mode", "gates", "drop", "error", "message"),
    [
        (
            "kda", "ready", {"g": torch.zeros(2, 4, 4)}, "", ValueError,
            r"gates\['g'\]: expected shape \(2, 4, 4, 24\) \(a vector of dk a node and value head\), got \(2, 4, 4\)",
        ),
        (
            "comba", "raw", {"p": torch.zeros(2, 4, 4, 24)}, "", ValueError,
            r"gates\['p'\]: expected shape \(2, 4, 2, 24\) \(a vector of dk a node and key head\)",
        ),
        (
            "gdn2", "ready", {"write": torch.zeros(2, 4, 4, 24)}, "", ValueError,
            r"gates\['write'\]: expected shape \(2, 4, 4, 20\) \(a vector of dv a node and value head\)",
        ),
        (
            "kda", "raw", {"dt_bias": torch.zeros(4 * 24)}, "", ValueError,
            r"gates\['dt_bias'\]: expected shape \(4, 24\) \(a vector of dk a value head\), got \(96,\)",
        ),
        (
            "lightning", "ready", {"g": torch.zeros(2, 4, 4)}, "", ValueError,
            r"gates\['g'\]: expected shape \(4,\) \(one value a value head\)",
        ),
        (
            "gla", "ready", {"g": torch.zeros(2, 4, 24, 4).transpose(2, 3)}, "", ValueError,
            r"gates\['g'\]: the last dimension must be contiguous",
        ),
        (
            "rwkv7", "raw", {"w": torch.zeros(2, 4, 4, 24, dtype=torch.int32)}, "", TypeError,
            r"gates\['w'\]: dtype torch.int32 is not allowed",
        ),
        ("mamba2", "raw", {"dt_max": float("nan")}, "", ValueError, r"gates\['dt_max'\]: nan is not finite"),
        ("mamba2", "raw", {"dt_min": float("inf")}, "", ValueError, r"gates\['dt_min'\]: inf is not finite"),
        ("kda", "raw", {"lower_bound": 5.0}, "", ValueError, r"'lower_bound'.: 5.0 is not allowed; allowed: -inf"),
        ("mamba2", "raw", {"dt_min": -1.0}, "", ValueError, r"gates\['dt_min'\]: -1.0 is not allowed; allowed: 0.0 to"),
        ("gla", "raw", {"normalizer": 0.0}, "", ValueError, r"'normalizer'\]: 0.0 is not allowed; allowed: 0.001"),
        ("gdn2", "raw", {"erase_scale": "2"}, "", TypeError, r"'erase_scale'\]: expected a Python float, got str"),
        ("mamba2", "raw", {}, "A_log", ValueError, "gates: missing A_log for mode 'raw' of 'mamba2'"),
        ("deltanet", "ready", {"g": torch.zeros(2, 4, 4)}, "", ValueError, "gates: unexpected g for mode 'ready'"),
        (
            "linear_attention", "ready", {"g": torch.zeros(2, 4, 4)}, "", ValueError,
            "gates: unexpected g for mode 'ready' of 'linear_attention'; allowed are ready: none",
        ),
    ],
)  # fmt: skip
def test_gates(name: str, mode: str, gates: Any, drop: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(name, mode, gates, drop)


def test_an_infinite_limit_may_be_given() -> None:
    first, second = call("mamba2", "raw"), call("mamba2", "raw", {"dt_max": float("inf")})
    assert torch.equal(first[0], second[0])


def test_pending_chains_hold_the_gates_of_the_calls_mode() -> None:
    spec = get_family("kda")
    for mode, other in (("raw", "ready"), ("ready", "raw")):
        inputs = family_inputs(SETUP, spec, TREE, mode=mode)
        pending = family_pending(SETUP, spec, other, inputs, 3, [1] * 4, [0] * 4)
        with pytest.raises(
            ValueError, match=rf"pending.gates: expected exactly .* \(of the call's gate mode '{mode}'\)"
        ):
            verify(inputs.q, inputs.k, inputs.v, **inputs.arguments, pending=pending)
    inputs = family_inputs(SETUP, spec, TREE, mode="raw")
    pending = family_pending(SETUP, spec, "raw", inputs, 3, [1] * 4, [0] * 4)
    pending.gates["f"] = pending.gates["f"][..., :5]
    with pytest.raises(ValueError, match=r"pending.gates\['f'\]: expected shape \(4, 3, 4, 24\) \(a vector of dk"):
        verify(inputs.q, inputs.k, inputs.v, **inputs.arguments, pending=pending)


def _buffers(name: str = "kda", **changes: Any) -> Factors:
    arguments = {"key_heads": 2, "value_heads": 4, "dk": 24, "dv": 20, "dtype": torch.float32, "gate_mode": "raw"}
    return Factors.allocate(TREE, **{**arguments, **changes}, recurrence=name)


def test_capture_buffers() -> None:
    made = _buffers()
    assert (made.gate_mode, made.gates.keys()) == ("raw", {"f", "b"})
    assert made.gates["f"].shape == (2, 4, 4, 24)
    assert _buffers("mamba2").gate_mode == "ready"
    assert _buffers("lightning", gate_mode="ready").gates == {}
    assert _buffers(gate_dtype=torch.bfloat16).nbytes_per_node == (2 * 24 + 4 * 20) * 4 + (4 * 24 + 4) * 2
    mixed = _buffers(gate_dtype={"f": torch.bfloat16})
    assert {n: t.dtype for n, t in mixed.gates.items()} == {"f": torch.bfloat16, "b": torch.float32}
    inputs = family_inputs(SETUP, get_family("kda"), TREE, mode="raw")
    call("kda", "raw", {"f": inputs.gates["f"].bfloat16()}, factors=mixed)
    assert torch.equal(mixed.gates["f"], inputs.gates["f"].bfloat16())
    assert torch.equal(mixed.gates["b"], inputs.gates["b"])
    with pytest.raises(ValueError, match=r"gate_dtype: expected some of \['b', 'f'\], got \['g'\]"):
        _buffers(gate_dtype={"g": torch.bfloat16})
    with pytest.raises(ValueError, match="gate_mode: 'cooked' is not allowed for 'kda'; allowed: ready, raw"):
        _buffers(gate_mode="cooked")
    with pytest.raises(ValueError, match=r"with 'ready' gates, expected 'kda' with 'raw' gates; .*gate_mode='raw'"):
        call("kda", "raw", factors=_buffers(gate_mode="ready"))
    with pytest.raises(TypeError, match=r"factors.gates\['f'\]: torch.bfloat16 cannot hold the torch.float32 of gates"):
        call("kda", "raw", factors=_buffers(gate_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"factors.gates\['f'\]: expected shape \(2, 4, 4, 24\)"):
        call("kda", "raw", factors=_buffers().replace(gates={"f": torch.zeros(2, 4, 4), "b": torch.zeros(2, 4, 4)}))


def test_factors_of_other_rows_are_refused_by_commit() -> None:
    _, factors = call("kda", "ready")
    broken = factors.replace(gates={**factors.gates, "g": factors.gates["g"][..., :7]})
    with pytest.raises(ValueError, match=r"factors\[0\].gates\['g'\]: expected shape \(2, 4, 4, 24\) \(a vector of dk"):
        commit(torch.zeros(4, 4, 20, 24), torch.tensor([0, 1]), broken, torch.tensor([0, 0]))


#: Every family of the library has kernels; those that are registered have none.
WITHOUT_KERNELS = {n: replace(FAMILIES[n], kernels=False, gate_formula="", unit_gate="") for n in ("gdn2", "rwkv7")}


def test_only_families_with_templates_run_on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BOLE_BACKEND", raising=False)
    monkeypatch.setattr(backends, "_warned", set())
    set_backend(None)
    device = torch.device("cuda", 0)
    for name, spec in WITHOUT_KERNELS.items():
        with pytest.warns(UserWarning, match=f"family '{name}' has no Triton kernels: it runs on the torch backend"):
            assert backends.get_backend(device, spec).name == "torch"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert backends.get_backend(device, spec).name == "torch"
    assert backends.get_backend(device, FAMILIES["gdn"]).name == "triton"
    set_backend("triton")
    with pytest.raises(NotImplementedError, match="family 'gdn2' has no Triton kernels; BOLE_BACKEND=torch serves it"):
        backends.get_backend(device, WITHOUT_KERNELS["gdn2"])


def test_a_spec_that_is_not_registered_has_no_reference() -> None:
    inputs = family_inputs(SETUP, get_family("gla"), TREE)
    fields = {
        n: getattr(get_family("gla"), n) for n, f in type(get_family("gla")).__dataclass_fields__.items() if f.init
    }
    own = type(get_family("gla"))(**{**fields, "name": "own"})
    arguments = {**inputs.arguments, "recurrence": own}
    out, _ = verify(inputs.q, inputs.k, inputs.v, **arguments)
    assert bool(torch.isfinite(out).all())
    set_backend("reference")
    with pytest.raises(ValueError, match=r"family 'own' has no reference; register_family\(\) takes one"):
        verify(inputs.q, inputs.k, inputs.v, **arguments)
