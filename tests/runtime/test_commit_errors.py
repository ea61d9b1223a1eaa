"""Wrong arguments of a commit: an error before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bole_runtime import Factors, PendingChain, TreeBatch, append, backends, commit, flush, verify
from bole_runtime.kernels.space import Config

B, N, HK, HV, DK, DV, SLOTS = 2, 4, 2, 4, 8, 6, 5
TREE = TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 2], [-1, 0, 1, -2]]))


def factors_for(tree: TreeBatch = TREE, dk: int = DK) -> Factors:
    gates = {"g": torch.zeros(B, N, HV), "beta": torch.zeros(B, N, HV)}
    q = torch.zeros(B, N, HK, dk)
    state = torch.zeros(SLOTS, HV, DV, dk)
    v = torch.zeros(B, N, HV, DV)
    return verify(q, q.clone(), v, gates=gates, state=state, slots=torch.tensor([3, 1]), tree=tree)[1]


FACTORS = factors_for()


@pytest.fixture(autouse=True)
def _nothing_may_run(monkeypatch: pytest.MonkeyPatch):
    def run(call: object) -> None:
        raise AssertionError("the backend was reached")

    monkeypatch.setitem(backends._loaded, "torch", backends.Backend("torch", run, run))


def call(**change: Any) -> None:
    base = {
        "pool": torch.zeros(SLOTS, HV, DV, DK),
        "slots": torch.tensor([3, 1]),
        "factors": FACTORS,
        "accepted": torch.tensor([3, 1]),
    }
    commit(**{**base, **change})


def pool(*shape: int) -> torch.Tensor:
    return torch.zeros(*(shape or (SLOTS, HV, DV, DK)))


def ring(capacity: int) -> PendingChain:
    k, v = torch.zeros(SLOTS, capacity, HK, DK), torch.zeros(SLOTS, capacity, HV, DV)
    gates = {"g": torch.zeros(SLOTS, capacity, HV), "beta": torch.zeros(SLOTS, capacity, HV)}
    return PendingChain(k, v, gates, *torch.zeros(2, SLOTS, dtype=torch.int32))


CASES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    (
        "pool type",
        {"pool": 3},
        TypeError,
        r"pool: expected a torch\.Tensor, or a list or tuple with one a layer, got int",
    ),
    ("pool order", {"pool": pool(SLOTS, HV, DK, DV)}, ValueError, r"pool: expected shape \(5, 4, 6, 8\)"),
    ("pool dtype", {"pool": pool().long()}, TypeError, r"pool: dtype torch\.int64 is not allowed"),
    (
        "pool stride",
        {"pool": torch.zeros(SLOTS, HV, DK, DV).mT},
        ValueError,
        "pool: dk, the last dimension, must be contig",
    ),
    ("pool expanded", {"pool": pool(1, HV, DV, DK).expand(SLOTS, -1, -1, -1)}, ValueError, "pool: expanded .stride 0."),
    ("factors type", {"factors": [1]}, TypeError, "factors: expected a Factors or a sequence of them, got int"),
    (
        "factors dict",
        {"factors": {}},
        TypeError,
        "factors: expected a Factors, or a list or tuple with one a layer, got dict",
    ),
    ("no layers", {"pool": [], "factors": []}, ValueError, "same number of layers, at least one, got 0 and 0"),
    ("layers", {"pool": [pool(), pool()]}, ValueError, "same number of layers, at least one, got 2 and 1"),
    (
        "second layer",
        {"pool": [pool(), pool(2, 2)], "factors": [FACTORS] * 2},
        ValueError,
        r"pool\[1\]: expected shape",
    ),
    ("accepted type", {"accepted": [3, 1]}, TypeError, r"accepted: expected a torch\.Tensor, got list"),
    ("accepted dtype", {"accepted": torch.zeros(B)}, TypeError, r"accepted: dtype torch\.float32 is not allowed"),
    ("accepted shape", {"accepted": torch.tensor([1])}, ValueError, r"accepted: expected shape \(2,\)"),
    (
        "accepted high",
        {"accepted": torch.tensor([4, 0])},
        ValueError,
        r"accepted\[0\] = 4 is outside -1 .nothing. to 3",
    ),
    ("accepted low", {"accepted": torch.tensor([0, -2])}, ValueError, r"accepted\[1\] = -2 is outside -1"),
    (
        "accepted padding",
        {"accepted": torch.tensor([0, 3])},
        ValueError,
        r"accepted\[1\] = 3 is a padding node of its tree",
    ),
    ("slots shape", {"slots": torch.tensor([[3, 1]])}, ValueError, r"slots: expected shape \(2,\)"),
    ("slots high", {"slots": torch.tensor([3, 5])}, ValueError, r"slots\[1\] = 5 is outside"),
    ("slots twice", {"slots": torch.tensor([3, 3])}, ValueError, "slots: requests 0 and 1 both commit to slot 3"),
    ("precision", {"precision": "exact"}, ValueError, "precision: 'exact' is not allowed"),
    ("validate", {"validate": "no"}, TypeError, "validate: expected a bool or None, got str"),
    *(
        (f"edited {name}", {"factors": FACTORS.replace(**edit)}, error, message)
        for name, edit, error, message in (
            ("gate stride", {"gates": {**FACTORS.gates, "g": torch.zeros(B, N, 2 * HV)[..., ::2]}}, ValueError,
             r"factors\[0\]\.gates\['g'\]: the last dimension must be contiguous .stride 1., got stride 2"),
            ("beta_scale", {"beta_scale": float("nan")}, ValueError, r"factors\[0\]\.beta_scale: nan is not finite"),
            ("beta_scale type", {"beta_scale": "x"}, TypeError, r"factors\[0\]\.beta_scale: expected a Python float"),
            ("options", {"options": None}, TypeError, r"factors\[0\]\.options: expected a mapping"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_commit(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**change)


def test_the_base_case_reaches_the_backend() -> None:
    with pytest.raises(AssertionError, match="the backend was reached"):
        call()


def test_padding_rows_may_hold_anything() -> None:
    with pytest.raises(AssertionError, match="the backend was reached"):
        call(slots=torch.tensor([3, -1]), accepted=torch.tensor([3, 99]))
    with pytest.raises(AssertionError, match="the backend was reached"):
        call(slots=torch.tensor([-1, -1]))


@pytest.mark.parametrize("layer", [0, 1])
def test_parameters_of_edited_factors(layer: int) -> None:
    made = Factors.allocate(
        TREE, key_heads=HK, value_heads=HV, dk=DK, dv=DV, dtype=torch.float32, recurrence="kda", gate_mode="raw"
    )
    whole = {**made.gates, "A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV, DK)}
    good = made.replace(gates=whole, options={"lower_bound": -5.0})
    for edit, message in (
        ({"gates": {**whole, "A_log": torch.zeros(2 * HV)[::2]}}, r"gates\['A_log'\]: the last dimension"),
        (
            {"gates": {**whole, "dt_bias": torch.zeros(DK, HV).T}},
            r"gates\['dt_bias'\]: the last dimension must be cont",
        ),
        ({"options": {"lower_bound": 5.0}}, r"options\['lower_bound'\]: 5.0 is not allowed; allowed: -inf to 0.0"),
        ({"options": {"lower_bound": float("nan")}}, r"options\['lower_bound'\]: nan is not finite"),
    ):
        parts = [good, good]
        parts[layer] = good.replace(**edit)
        with pytest.raises(ValueError, match=rf"factors\[{layer}\]\.{message}"):
            call(pool=[pool(), pool()], factors=parts)


def test_layers_share_a_tree_and_no_pool() -> None:
    other = TreeBatch.from_parents(TREE.parents)
    with pytest.raises(ValueError, match=r"factors\[1\]: all layers of a commit must share the tree"):
        call(pool=[pool(), pool()], factors=[FACTORS, FACTORS.replace(tree=other)])
    shared = pool()
    with pytest.raises(ValueError, match="pool: two layers share a pool"):
        call(pool=[shared, shared], factors=[FACTORS, FACTORS])
    with pytest.raises(ValueError, match=r"slots\[0\] = 5 is outside"):
        call(pool=[pool(6, HV, DV, DK), pool()], factors=[FACTORS] * 2, slots=torch.tensor([5, 1]))


BROKEN: dict[str, Any] = {
    "type": lambda part: [part],
    "k no tensor": lambda part: part.replace(k=[0.0]),
    "k dtype": lambda part: part.replace(k=part.k.long()),
    "k and v differ": lambda part: part.replace(v=part.v.double()),
    "k rows": lambda part: part.replace(k=part.k[:, :-1]),
    "k heads": lambda part: part.replace(k=torch.zeros(B, N, 3, DK)),
    "k dims": lambda part: part.replace(k=torch.zeros(B, N, HK, DK + 1)),
    "k stride": lambda part: part.replace(k=torch.zeros(B, N, DK, HK).mT),
    "v heads": lambda part: part.replace(v=torch.zeros(B, N, HV + 2, DV)),
    "v stride": lambda part: part.replace(v=torch.zeros(B, N, DV, HV).mT),
    "meta": lambda part: part.replace(v=part.v.to("meta")),
    "mode": lambda part: part.replace(gate_mode="eager"),
    "gates": lambda part: part.replace(gates=[]),
    "gate missing": lambda part: part.replace(gates={"g": part.gates["g"]}),
    "gate renamed": lambda part: part.replace(gates={"g": part.gates["g"], "b": part.gates["beta"]}),
    "gate no tensor": lambda part: part.replace(gates={**part.gates, "beta": 1.0}),
    "gate dtype": lambda part: part.replace(gates={**part.gates, "beta": part.gates["beta"].int()}),
    "gate shape": lambda part: part.replace(gates={**part.gates, "g": torch.zeros(B, N, HK)}),
    "gate meta": lambda part: part.replace(gates={**part.gates, "g": part.gates["g"].to("meta")}),
    "other mode": lambda part: part.replace(gate_mode="raw"),
    "chain": lambda part: part.replace(pending=ring(65)),
    "chain type": lambda part: part.replace(pending=3),
}


@pytest.mark.parametrize("what", BROKEN)
def test_layers_after_the_first_are_checked_like_the_first(what: str) -> None:
    errors = []
    for n in range(3):
        parts = [FACTORS.replace() for _ in range(3)]
        parts[n] = BROKEN[what](parts[n])
        with pytest.raises((TypeError, ValueError)) as caught:
            call(pool=[pool(), pool(), pool()], factors=parts)
        errors.append((caught.type, str(caught.value).replace(f"[{n}]", "[n]", 1)))
    if what != "type":  # That of the first is found before any layer is looked at.
        assert errors[0] == errors[1] == errors[2]


@pytest.mark.parametrize(
    "broken", [pool(SLOTS, HV, DK, DV), pool().long(), torch.zeros(SLOTS, HV, DK, DV).mT, pool().to("meta"), 3]
)
def test_pools_after_the_first_are_checked_like_the_first(broken: Any) -> None:
    for n in range(3):
        pools = [pool(), pool(), pool()]
        pools[n] = broken
        with pytest.raises((TypeError, ValueError), match=rf"^pool\[{n}\]: "):
            call(pool=pools, factors=[FACTORS] * 3)


def test_layers_that_differ_where_they_may_are_taken() -> None:
    wide = FACTORS.replace(k=torch.zeros(B, N, HK, 16), v=torch.zeros(B, N, 2 * HV, 10))
    wide = wide.replace(gates={name: torch.zeros(B, N, 2 * HV, dtype=torch.bfloat16) for name in ("beta", "g")})
    with pytest.raises(AssertionError, match="the backend was reached"):
        call(
            pool=[pool(), torch.zeros(SLOTS, 2 * HV, 10, 16), pool().bfloat16()],
            factors=[FACTORS, wide, FACTORS],
        )


def test_values_are_not_read_without_validation() -> None:
    with pytest.raises(AssertionError, match="the backend was reached"):
        call(slots=torch.tensor([3, 3]), accepted=torch.tensor([77, 3]), validate=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"k": torch.zeros(B, 2, HK, DK)},
            r"factors\[0\]: k \(2, 2, 2, 8\) and v .* are not of the tree's rows \(2, 4\)",
        ),
        ({"v": torch.zeros(B, N + 1, HV, DV)}, "are not of the tree's rows"),
        ({"tree": TreeBatch.chain(B, N + 2)}, "are not of the tree's rows"),
        (
            {"gates": {"g": torch.zeros(B, 1, HV), "beta": torch.zeros(B, N, HV)}},
            r"factors\[0\].gates\['g'\]: expected",
        ),
    ],
)
def test_factors_of_other_rows(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        commit(torch.zeros(SLOTS, HV, DV, DK), torch.tensor([3, 1]), FACTORS.replace(**change), torch.tensor([2, 1]))


def test_a_variant_is_a_configuration() -> None:
    with pytest.raises(TypeError, match="variant: expected a Config"):
        commit(torch.zeros(SLOTS, HV, DV, DK), torch.tensor([3, 1]), FACTORS, torch.tensor([2, 1]), variant="path")
    config = Config("fused", ())
    with pytest.raises(ValueError, match="variant: no 'commit' variant is called 'fused'"):
        call(variant=config)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gates": {}}, ValueError, r"factors\[0\]\.gates: missing g, which 'gdn' has with 'ready' gates"),
        ({"gates": None}, TypeError, r"factors\[0\]\.gates: expected a mapping .*, got NoneType"),
        (
            {"gates": {"g": 1.0, "beta": 1.0}},
            TypeError,
            r"factors\[0\]\.gates\['g'\]: expected a torch\.Tensor, got float",
        ),
        (
            {"gate_mode": "boo"},
            ValueError,
            r"factors\[0\]\.gate_mode: 'boo' is not allowed for 'gdn'; allowed: ready, raw",
        ),
        ({"gate_mode": "raw"}, ValueError, r"factors\[0\]\.gates: missing a, which 'gdn' has with 'raw' gates"),
        ({"tree": None}, TypeError, r"factors\[0\]\.tree: expected a TreeBatch, got NoneType"),
        ({"spec": "gdn"}, TypeError, r"factors\[0\]\.spec: expected a RecurrenceSpec, got str"),
        ({"k": None}, TypeError, r"factors\[0\]\.k: expected a torch\.Tensor, got NoneType"),
        ({"k": torch.zeros(B, N, 3, DK)}, ValueError, r"factors\[0\]\.v: HV = 4 must be a positive multiple of HK = 3"),
        (
            {"k": torch.zeros(B, N, HK, DK).bfloat16()},
            TypeError,
            r"factors\[0\]\.v: dtype torch\.float32 is not allowed",
        ),
        ({"k": torch.zeros(B, N, HK, 2 * DK)[..., ::2]}, ValueError, r"factors\[0\]\.k: the last dimension must be"),
        ({"pending": {}}, TypeError, r"factors\[0\]\.pending: expected a PendingChain or None, got dict"),
        (
            {"pending": ring(65)},
            ValueError,
            r"factors\[0\]\.pending\.k: the capacity, dimension 1, must be 1 to 64, got 65",
        ),
    ],
)
def test_edited_factors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(factors=FACTORS.replace(**change))


def edited(**change: Any) -> PendingChain:
    chain = ring(3)
    return PendingChain(**{name: change.get(name, getattr(chain, name)) for name in PendingChain.__slots__})


COUNTS = torch.zeros(SLOTS, dtype=torch.int32)
CHAINS: list[tuple[str, PendingChain, type[Exception], str]] = [
    ("int64 length", edited(length=COUNTS.long()), TypeError, r"\.length: dtype torch\.int64 is not allowed"),
    ("fp32 length", edited(length=COUNTS.float()), TypeError, r"\.length: dtype torch\.float32 is not allowed"),
    ("int64 start", edited(start=COUNTS.long()), TypeError, r"\.start: dtype torch\.int64 is not allowed"),
    ("list", edited(start=[0] * SLOTS), TypeError, r"\.start: expected a torch\.Tensor, got list"),
    ("counts", edited(length=COUNTS[:-1]), ValueError, r"\.length: expected shape \(5,\)"),
    ("every second", edited(start=COUNTS.repeat(2)[::2]), ValueError, r"\.start: expected shape \(5,\)"),
    ("dk", edited(k=torch.zeros(SLOTS, 3, HK, DK // 2)), ValueError, r"\.k: expected shape \(5, 3, 2, 8\)"),
    ("dv", edited(v=torch.zeros(SLOTS, 3, HV, DV + 1)), ValueError, r"\.v: expected shape \(5, 3, 4, 6\)"),
    ("slots", edited(k=torch.zeros(SLOTS + 1, 3, HK, DK)), ValueError, r"\.k: expected shape \(5, 3, 2, 8\)"),
    ("dims", edited(k=torch.zeros(SLOTS, 3, DK)), ValueError, r"\.k: expected \[slots, capacity, HK, dk\]"),
    ("dtype", edited(k=torch.zeros(SLOTS, 3, HK, DK).half()), TypeError, r"\.k: dtype torch\.float16 is not allowed"),
    ("stride", edited(k=torch.zeros(SLOTS, 3, HK, 2 * DK)[..., ::2]), ValueError, r"\.k: the last dimension must be"),
    ("no gates", edited(gates={}), ValueError, r"\.gates: expected exactly \['beta', 'g'\]"),
    ("gates", edited(gates=None), ValueError, r"\.gates: expected exactly \['beta', 'g'\].*, got NoneType"),
    ("gate type", edited(gates={"g": 1.0, "beta": 1.0}), TypeError, r"\.gates\['g'\]: expected a torch\.Tensor"),
    ("nothing", PendingChain(None, None, None, None, None), TypeError, r"\.k: expected a torch\.Tensor, got NoneType"),
]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("chain", "error", "message"), [c[1:] for c in CHAINS], ids=[c[0] for c in CHAINS])
def test_edited_pending_chains(chain: PendingChain, error: type[Exception], message: str, layers: int) -> None:
    # The first layer may be right: what is like it is compared alone.
    parts = [FACTORS.replace(pending=ring(3))] * (layers - 1) + [FACTORS.replace(pending=chain)]
    for run in (commit, append):
        with pytest.raises(error, match=rf"^factors\[{layers - 1}\]\.pending{message}"):
            run([pool() for _ in parts], torch.tensor([3, 1]), parts, torch.tensor([3, 1]))


@pytest.mark.parametrize("chain", [c[1] for c in CHAINS if c[0] not in ("dk", "dv")])
def test_chains_of_a_flush(chain: PendingChain) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^pending\."):
        flush(pool(), torch.tensor([3, 1]), chain)


def test_chains_of_layers_that_are_alike_pass() -> None:
    counts = {"length": COUNTS, "start": COUNTS.clone()}
    parts = [FACTORS.replace(pending=edited(**counts)) for _ in range(3)]
    with pytest.raises(AssertionError, match="the backend was reached"):
        call(pool=[pool() for _ in parts], factors=parts)
