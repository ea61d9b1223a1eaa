"""Wrong arguments: an error that names the argument, what was given and what is allowed, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bole_runtime import Factors, PendingChain, TreeBatch, backends, verify
from bole_runtime.calls import CommitCall, VerifyCall
from bole_runtime.kernels.space import Config
from bole_runtime.kernels.variants import all_variants
from bole_runtime.validate_values import check_status

B, N, HK, HV, DK, DV, SLOTS = 2, 4, 2, 4, 8, 6, 5


@pytest.fixture(autouse=True)
def _nothing_may_run(monkeypatch: pytest.MonkeyPatch):
    """Replace the torch backend by one that fails: every error must come before it."""

    def run(call: VerifyCall | CommitCall) -> None:
        raise AssertionError("the backend was reached")

    monkeypatch.setitem(backends._loaded, "torch", backends.Backend("torch", run, run))


def arguments(packed: bool = False, raw: bool = False) -> dict[str, Any]:
    if packed:
        tree = TreeBatch.from_packed(torch.tensor([-1, 0, 1] * B), torch.tensor([0, 3, 6]), N)
    else:
        tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 2]] * B))
    lead = tree.lead
    gates = {"g": torch.zeros(*lead, HV), "beta": torch.zeros(*lead, HV)}
    if raw:
        gates = {"a": gates["g"], "b": gates["beta"], "A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV)}
    return {
        "q": torch.zeros(*lead, HK, DK),
        "k": torch.zeros(*lead, HK, DK),
        "v": torch.zeros(*lead, HV, DV),
        "gates": gates,
        "state": torch.zeros(SLOTS, HV, DV, DK),
        "slots": torch.tensor([3, 1]),
        "tree": tree,
    }


def call(change: dict[str, Any], **base: bool) -> None:
    kwargs = {**arguments(**base), **change}
    verify(kwargs.pop("q"), kwargs.pop("k"), kwargs.pop("v"), **kwargs)


def test_the_base_case_reaches_the_backend() -> None:
    for base in ({}, {"packed": True}, {"raw": True}):
        with pytest.raises(AssertionError, match="the backend was reached"):
            call({}, **base)


def strided(*shape: int) -> torch.Tensor:
    """Return zeros whose last stride is 2."""
    return torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2]


HALF = torch.zeros(B, N, HK, DK, dtype=torch.float16)
CASES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("tree type", {"tree": [[-1]]}, TypeError, "tree: expected a TreeBatch, got list"),
    ("q type", {"q": None}, TypeError, r"q: expected a torch\.Tensor, got NoneType"),
    ("k type", {"k": [1]}, TypeError, r"k: expected a torch\.Tensor, got list"),
    ("q int", {"q": torch.zeros(B, N, HK, DK, dtype=torch.int32)}, TypeError, r"q: dtype torch\.int32 is not allowed"),
    ("k dtype", {"k": HALF}, TypeError, r"k: dtype torch\.float16 is not allowed; allowed: torch\.float32"),
    ("v dtype", {"v": torch.zeros(B, N, HV, DV).bfloat16()}, TypeError, r"v: dtype torch\.bfloat16 is not allowed"),
    ("q packed", {"q": torch.zeros(B * N, HK, DK)}, ValueError, r"q: expected dense \[B, N, HK, dk\]"),
    (
        "q nodes",
        {"q": torch.zeros(B, N + 1, HK, DK)},
        ValueError,
        r"q: expected shape \(2, 4, 2, 8\).*got \(2, 5, 2, 8\)",
    ),
    ("q batch", {"q": torch.zeros(B + 1, N, HK, DK)}, ValueError, r"q: expected shape \(2, 4, 2, 8\) .the capacity"),
    ("k shape", {"k": torch.zeros(B, N, HK, DK + 1)}, ValueError, r"k: expected shape \(2, 4, 2, 8\) .the shape of q"),
    ("v nodes", {"v": torch.zeros(B, N + 1, HV, DV)}, ValueError, r"v: expected shape .*the capacity of the tree"),
    ("v heads", {"v": torch.zeros(B, N, 5, DV)}, ValueError, "v: HV = 5 must be a positive multiple of HK = 2"),
    ("v none", {"v": torch.zeros(B, N, 0, DV)}, ValueError, "v: HV = 0 must be a positive multiple"),
    ("dk 0", {"q": HALF[..., :0].float(), "k": HALF[..., :0].float()}, ValueError, "q: HK and dk must be at least 1"),
    (
        "q stride",
        {"q": strided(B, N, HK, DK)},
        ValueError,
        "q: the last dimension must be contiguous .stride 1., got stride 2",
    ),
    ("v stride", {"v": strided(B, N, HV, DV)}, ValueError, "v: the last dimension must be contiguous"),
    ("q device", {"q": torch.zeros(B, N, HK, DK, device="meta")}, ValueError, "q: on meta, but the tree is on cpu"),
    ("state type", {"state": 3}, TypeError, r"state: expected a torch\.Tensor, got int"),
    ("state dtype", {"state": torch.zeros(SLOTS, HV, DV, DK).int()}, TypeError, r"state: dtype torch\.int32"),
    ("state order", {"state": torch.zeros(SLOTS, HV, DK, DV)}, ValueError, r"state: expected shape \(5, 4, 6, 8\)"),
    ("state dims", {"state": torch.zeros(HV, DV, DK)}, ValueError, "state: expected shape .*slots, HV, dv, dk"),
    (
        "state stride",
        {"state": strided(SLOTS, HV, DV, DK)},
        ValueError,
        "state: dk, the last dimension, must be contig",
    ),
    ("state device", {"state": torch.zeros(SLOTS, HV, DV, DK, device="meta")}, ValueError, "state: on meta"),
    ("slots type", {"slots": [3, 1]}, TypeError, r"slots: expected a torch\.Tensor, got list"),
    (
        "slots dtype",
        {"slots": torch.zeros(B)},
        TypeError,
        r"slots: dtype torch\.float32 is not allowed; allowed: torch\.int32",
    ),
    ("slots shape", {"slots": torch.tensor([1])}, ValueError, r"slots: expected shape \(2,\)"),
    ("slots high", {"slots": torch.tensor([1, 5])}, ValueError, r"slots\[1\] = 5 is outside -1 .padding. to 4"),
    ("slots low", {"slots": torch.tensor([-2, 1])}, ValueError, r"slots\[0\] = -2 is outside -1"),
    ("gates type", {"gates": [1]}, TypeError, "gates: expected a mapping"),
    (
        "gates none",
        {"gates": {}},
        ValueError,
        "gates: missing beta, g for mode 'ready' of 'gdn'; allowed are ready: g, beta; raw: a",
    ),
    ("gates missing", {"gates": {"g": torch.zeros(B, N, HV)}}, ValueError, "gates: missing beta for mode 'ready'"),
    ("precision", {"precision": "exact"}, ValueError, "precision: 'exact' is not allowed; allowed: fast, lossless"),
    ("family", {"recurrence": "gnd"}, ValueError, "recurrence: unknown family 'gnd'. Supported: .*gdn"),
    ("family out", {"recurrence": "mamba1"}, ValueError, "recurrence: 'mamba1' is outside the supported form"),
    ("family type", {"recurrence": 3}, TypeError, "recurrence: expected the name of a family, got int"),
    ("scale type", {"scale": "1"}, TypeError, "scale: expected a Python float, got str"),
    ("scale nan", {"scale": float("nan")}, ValueError, "scale: nan is not finite"),
    ("l2norm", {"qk_l2norm": 1}, TypeError, "qk_l2norm: expected a bool or None, got int"),
    ("out dtype", {"out_dtype": torch.int8}, TypeError, r"out_dtype: torch\.int8 is not allowed"),
    ("out type", {"out": 1}, TypeError, r"out: expected a torch\.Tensor, got int"),
    ("out shape", {"out": torch.zeros(B, N, HV, DV + 1)}, ValueError, "out: expected shape .*the shape of v"),
    ("out stride", {"out": strided(B, N, HV, DV)}, ValueError, "out: the last dimension must be contiguous"),
    (
        "out and dtype",
        {"out": torch.zeros(B, N, HV, DV), "out_dtype": torch.bfloat16},
        TypeError,
        r"out: dtype torch\.float32 is not allowed; allowed: torch\.bfloat16",
    ),
    ("workspace", {"workspace": 1}, TypeError, r"workspace: expected a torch\.Tensor or None"),
    ("factors", {"factors": {}}, TypeError, "factors: expected a Factors or None, got dict"),
    ("pending", {"pending": {}}, TypeError, "pending: expected a PendingChain or None, got dict"),
]


@pytest.mark.parametrize(("change", "error", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_verify(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(change)


def test_gates() -> None:
    gates = arguments()["gates"]
    with pytest.raises(ValueError, match="gates: unexpected b for mode 'ready'"):
        call({"gates": {**gates, "b": gates["beta"]}})
    with pytest.raises(ValueError, match="gates: missing beta and unexpected bta"):
        call({"gates": {"g": gates["g"], "bta": gates["beta"]}})
    with pytest.raises(ValueError, match=r"gates\['beta'\]: expected shape \(2, 4, 4\).*got \(2, 4, 2\)"):
        call({"gates": {**gates, "beta": torch.zeros(B, N, HK)}})
    with pytest.raises(TypeError, match=r"gates\['g'\]: expected a torch\.Tensor, got float"):
        call({"gates": {**gates, "g": 0.0}})
    with pytest.raises(TypeError, match=r"gates\['g'\]: dtype torch\.int64 is not allowed"):
        call({"gates": {**gates, "g": gates["g"].long()}})
    with pytest.raises(ValueError, match=r"gates\['g'\]: on meta"):
        call({"gates": {**gates, "g": gates["g"].to("meta")}})
    with pytest.raises(ValueError, match=r"gates\['g'\]: the last dimension must be contiguous"):
        call({"gates": {**gates, "g": strided(B, N, HV)}})


def test_raw_gates() -> None:
    gates = arguments(raw=True)["gates"]
    with pytest.raises(ValueError, match="gates: missing dt_bias for mode 'raw'"):
        call({"gates": {n: t for n, t in gates.items() if n != "dt_bias"}})
    with pytest.raises(ValueError, match=r"gates\['A_log'\]: expected shape \(4,\) .one value a value head"):
        call({"gates": {**gates, "A_log": torch.zeros(HK)}})
    with pytest.raises(TypeError, match=r"gates\['beta_scale'\]: expected a Python float, got Tensor"):
        call({"gates": {**gates, "beta_scale": torch.tensor(2.0)}})
    with pytest.raises(ValueError, match="gates: unexpected beta_scale for mode 'ready'"):
        call({"gates": {**arguments()["gates"], "beta_scale": 2.0}})


def test_packed() -> None:
    with pytest.raises(ValueError, match=r"q: expected packed \[T, HK, dk\] because the tree is packed"):
        call({"q": torch.zeros(B, 3, HK, DK)}, packed=True)
    with pytest.raises(ValueError, match=r"q: expected shape \(6, 2, 8\).*got \(5, 2, 8\)"):
        call({"q": torch.zeros(5, HK, DK)}, packed=True)


@pytest.mark.parametrize("name", ["q", "k", "v", "state", "g"])
def test_out_must_not_overlap_an_input(name: str) -> None:
    args = arguments()
    flat = torch.zeros(4 * B * N * HV * DV * DK)
    for offset in (0, 5):
        args = arguments()
        if name == "g":
            args["gates"]["g"] = flat[offset : offset + B * N * HV].view(B, N, HV)
        else:
            args[name] = flat[offset : offset + args[name].numel()].view_as(args[name])
        with pytest.raises(ValueError, match=f"out: overlaps {name} in memory"):
            call({**args, "out": flat[: B * N * HV * DV].view(B, N, HV, DV)})
    apart = flat[B * N * HV * DV :]
    args = arguments()
    args["state"] = apart[: args["state"].numel()].view_as(args["state"])
    with pytest.raises(AssertionError, match="the backend was reached"):
        call({**args, "out": flat[: B * N * HV * DV].view(B, N, HV, DV)})


def buffers(**change: Any) -> Factors:
    tree = arguments()["tree"]
    return Factors.allocate(
        tree, **{"key_heads": HK, "value_heads": HV, "dk": DK, "dv": DV, "dtype": torch.float32, **change}
    )


def test_capture_buffers() -> None:
    with pytest.raises(AssertionError, match="the backend was reached"):
        call({"factors": buffers()})
    with pytest.raises(TypeError, match=r"factors\.k: dtype torch\.bfloat16 is not allowed; allowed: torch\.float32"):
        call({"factors": buffers(dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match=r"factors\.v: expected shape \(2, 4, 4, 6\)"):
        call({"factors": buffers(dv=DV + 1)})
    with pytest.raises(TypeError, match=r"factors\.gates\['beta'\]: expected a torch\.Tensor, got NoneType"):
        call({"factors": buffers().replace(gates={"g": torch.zeros(B, N, HV)})})
    with pytest.raises(
        ValueError, match="factors: buffers of family 'gdn' with 'raw' gates, expected 'gdn' with 'ready'"
    ):
        call({"factors": buffers().replace(gate_mode="raw")})
    with pytest.raises(ValueError, match=r"factors\.k: the heads of a node must be contiguous"):
        call({"factors": buffers().replace(k=torch.zeros(B, N, HK, DK + 1)[..., :DK])})
    with pytest.raises(ValueError, match="value_heads: 3 is not a positive multiple of key_heads = 2"):
        buffers(value_heads=3)
    for name, value in (("key_heads", 2.0), ("key_heads", "2"), ("dk", True), ("dv", None)):
        with pytest.raises(TypeError, match=f"{name}: expected an int, got {type(value).__name__}"):
            buffers(**{name: value})
    for name, wrong in (("dk", -1), ("dk", 0), ("dv", 0), ("key_heads", 0), ("value_heads", -4)):
        with pytest.raises(ValueError, match=f"{name}: {wrong} is not allowed; allowed: 1 to"):
            buffers(**{name: wrong})
    with pytest.raises(TypeError, match="recurrence: expected the name of a family, got NoneType"):
        buffers(recurrence=None)


def chain(**change: Any) -> PendingChain:
    made = {
        "k": torch.zeros(SLOTS, 3, HK, DK),
        "v": torch.zeros(SLOTS, 3, HV, DV),
        "gates": {"g": torch.zeros(SLOTS, 3, HV), "beta": torch.zeros(SLOTS, 3, HV)},
        "length": torch.zeros(SLOTS, dtype=torch.int32),
        "start": torch.zeros(SLOTS, dtype=torch.int32),
    }
    return PendingChain(**{**made, **change})


def test_pending_chains() -> None:
    with pytest.raises(AssertionError, match="the backend was reached"):
        call({"pending": chain()})
    with pytest.raises(ValueError, match=r"pending\.k: expected shape \(5, 3, 2, 8\) .slots of the pool"):
        call({"pending": chain(k=torch.zeros(SLOTS + 1, 3, HK, DK))})
    with pytest.raises(ValueError, match=r"pending\.k: expected \[slots, capacity, HK, dk\]"):
        call({"pending": chain(k=torch.zeros(3, HK, DK))})
    for capacity in (0, 65, 5000):
        with pytest.raises(ValueError, match=rf"pending\.k: the capacity, .* must be 1 to 64, got {capacity}"):
            call({"pending": chain(k=torch.zeros(SLOTS, capacity, HK, DK))})
    with pytest.raises(AssertionError, match="the backend was reached"):
        call({"pending": chain()}, raw=True)
    gates = chain().gates
    with pytest.raises(ValueError, match=r"pending\.gates: expected exactly \['beta', 'g'\] .ready gates, whatever"):
        call({"pending": chain(gates={"a": gates["g"], "b": gates["beta"]})}, raw=True)
    with pytest.raises(TypeError, match=r"pending\.gates\['g'\]: dtype torch\.bfloat16 is not allowed"):
        call({"pending": chain(gates={**gates, "g": gates["g"].bfloat16()})})
    wide = torch.zeros(SLOTS, 4, HV)[:, :3]
    with pytest.raises(ValueError, match=r"pending\.gates: all must have the same strides"):
        call({"pending": chain(gates={**gates, "beta": wide})})
    with pytest.raises(TypeError, match=r"pending\.length: dtype torch\.int64 is not allowed"):
        call({"pending": chain(length=torch.zeros(SLOTS, dtype=torch.int64))})
    with pytest.raises(ValueError, match=r"pending\.length: values must be 0 to 3"):
        call({"pending": chain(length=torch.full((SLOTS,), 4, dtype=torch.int32))})
    with pytest.raises(ValueError, match=r"pending\.start: values must be 0 to 2"):
        call({"pending": chain(start=torch.full((SLOTS,), 3, dtype=torch.int32))})


def test_a_faulty_tree_is_refused_where_values_are_checked() -> None:
    tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 7, 2]] * B), validate=False)
    with pytest.raises(ValueError, match=r"tree: status 8 \(parent is no live node\)"):
        call({"tree": tree})
    with pytest.raises(AssertionError, match="the backend was reached"):
        call({"tree": tree, "validate": False})


def test_every_bit_of_a_status_has_a_name() -> None:
    tree = TreeBatch(B, N, max_total=3, validate=False)
    tree.pack_(torch.tensor([[-1, 0, 0], [-1, 0, -2]]))
    with pytest.raises(ValueError, match=r"tree: status 16 \(more nodes in all than max_total\)"):
        check_status(tree)


def test_a_variant_is_a_configuration() -> None:
    with pytest.raises(TypeError, match=r"variant: expected a Config .* or None, got str"):
        call({"variant": "fused"})
    commits = all_variants("commit")[0]
    config = Config(commits.name, tuple((p.name, p.choices[0]) for p in commits.params))
    with pytest.raises(ValueError, match="variant: no 'verify' variant is called 'steps'; known: 'fused'"):
        call({"variant": config})


def test_a_number_beyond_floats() -> None:
    with pytest.raises(ValueError, match="scale: inf is not finite"):
        call({"scale": 10**400})


def test_an_expanded_output() -> None:
    with pytest.raises(ValueError, match="out: expanded"):
        call({"out": torch.zeros(1, 1, HV, DV).expand(B, N, HV, DV)})
