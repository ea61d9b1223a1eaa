"""Flush and append on pools and rings that the caller owns."""

from __future__ import annotations

import contextlib
import math
import random
from typing import Any

import pytest
import torch
from bole_testing.cases.base import Setup, make_inputs, make_pending
from bole_testing.close import assert_close, assert_same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

import bole_runtime
from bole_runtime import Factors, PendingChain, TreeBatch, append, commit, flush, verify
from bole_runtime.calls import RowAction
from bole_runtime.reference import commit_sequential, flush_sequential

SETUP = Setup(verify, commit, torch.device("cpu"), torch.float32, torch.float32, "lossless")
SLOTS = torch.tensor([3, 0, -1])


def layer(seed: int = 0, lengths: tuple[int, ...] = (2, 6, 4, 0), pending: PendingChain | None = None) -> Any:
    inputs = make_inputs(SETUP, TREE, dims=(8, 8), slots=SLOTS.tolist(), pool_slots=4, seed=seed)
    inputs.state.nan_to_num_(0.5)
    chain = make_pending(SETUP, inputs, 8, list(lengths), [0, 5, 3, 7], seed=seed)
    if pending is not None:
        chain = PendingChain(chain.k, chain.v, chain.gates, pending.length, pending.start)
    return inputs.replace(options={"pending": chain}), chain


TREE = TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2], [-1, 0, 1, 2]]))


def test_flush_folds_chains_and_empties_them() -> None:
    (one, first), (two, second) = layer(1), (None, None)
    two, second = layer(2, pending=first)
    pools, slots = [one.state.clone(), two.state.clone()], torch.tensor([1, 3, 0, -1])
    wants = [flush_sequential(p, slots, c) for p, c in zip(pools, (first, second), strict=True)]
    before = [p.clone() for p in pools]
    flush(pools, slots, [first, second], torch.tensor([True, True, False, True]))
    for pool, want, old in zip(pools, wants, before, strict=True):
        assert_close("flushed", pool[1], want[0], 1e-6)
        assert_same_bits("empty chain, masked row and absent slot", pool[[0, 2, 3]], old[[0, 2, 3]])
    assert first.length.tolist() == [2, 0, 4, 0]
    assert first.start.tolist() == [0, 5, 3, 7]
    flush(pools[0], torch.tensor([0, 2]), PendingChain(first.k, first.v, first.gates, first.length, first.start))
    assert first.length.tolist() == [0, 0, 0, 0]


def test_append_then_flush_is_a_commit() -> None:
    one, chain = layer(3, lengths=(2, 0, 0, 0))
    two, other = layer(4, pending=chain)
    parts = [verify(i.q, i.k, i.v, **i.arguments)[1] for i in (one, two)]
    pools = [one.state.clone(), two.state.clone()]
    accepted = torch.tensor([3, 2, 1])
    wants = [commit_sequential(p, SLOTS, part, accepted) for p, part in zip(pools, parts, strict=True)]
    before = [p.clone() for p in pools]
    actions = append(pools, SLOTS, parts, accepted)
    assert actions.tolist() == [RowAction.APPEND, RowAction.APPEND, RowAction.NONE]
    for pool, old in zip(pools, before, strict=True):
        assert_same_bits("an append leaves states alone", pool, old)
    assert chain.length.tolist() == [5, 0, 0, 3]
    flush(pools, SLOTS, [chain, other])
    for pool, want in zip(pools, wants, strict=True):
        assert_close("later", pool[[3, 0]], want[:2], 1e-6)


def test_what_does_not_fit_is_committed() -> None:
    one, chain = layer(5, lengths=(6, 0, 0, 0))
    part = verify(one.q, one.k, one.v, **one.arguments)[1]
    want = commit_sequential(one.state, SLOTS, part, torch.tensor([2, 3, -1]))
    actions = append(one.state, SLOTS, part, torch.tensor([2, 3, -1]), limit=7)
    assert actions.tolist() == [RowAction.APPEND, RowAction.COMMIT, RowAction.NONE]
    assert_close("committed", one.state[0], want[1], 1e-6)
    assert chain.length.tolist() == [0, 0, 0, 2]


def test_many_appends_around_the_ring() -> None:
    rng = random.Random(0)
    one, chain = layer(6, lengths=(0, 0, 0, 0))
    exact = one.state.double()
    for n in range(40):
        given = make_inputs(SETUP, TREE, dims=(8, 8), slots=SLOTS.tolist(), pool_slots=4, seed=50 + n)
        given = given.replace(state=one.state, options={"pending": chain})
        part = verify(given.q, given.k, given.v, **given.arguments)[1]
        accepted = torch.tensor([rng.choice([-1, 0, 1, 2, 3]) for _ in range(3)])
        new = commit_sequential(exact, SLOTS, part.replace(pending=None), accepted)
        exact = exact.index_copy(0, SLOTS[:2], new[:2])
        append(one.state, SLOTS, part, accepted)
    flush(one.state, SLOTS, chain)
    assert_close("forty rounds", one.state[[3, 0]], exact[[3, 0]], 2e-6)


FLUSH_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"pool": 3}, TypeError, r"pool: expected a torch\.Tensor"),
    ({"pool": torch.zeros(4, 4, 8, 9)}, ValueError, r"pool: expected shape \(4, 4, 8, 8\)"),
    ({"pending": 3}, TypeError, "pending: expected a PendingChain"),
    ({"pending": []}, ValueError, "same number of layers, got 1 and 0"),
    ({"slots": [1]}, TypeError, r"slots: expected a torch\.Tensor"),
    ({"slots": torch.tensor([4])}, ValueError, r"slots\[0\] = 4 is outside"),
    ({"slots": torch.tensor([1, 1])}, ValueError, "slots: a slot occurs twice"),
    ({"rows": torch.ones(2)}, TypeError, r"rows: dtype torch\.float32"),
    ({"rows": torch.ones(2, dtype=torch.bool)}, ValueError, r"rows: expected shape \(1,\)"),
    ({"precision": "exact"}, ValueError, "precision: 'exact'"),
    ({"recurrence": "mamba1"}, ValueError, "outside the supported form"),
    ({"variant": "path"}, TypeError, "variant: expected a Config"),
    ({"gates": [{}, {}]}, ValueError, "gates: 2 for 1 layers"),
]


@pytest.mark.parametrize(("change", "error", "message"), FLUSH_ERRORS, ids=[e[2][:24] for e in FLUSH_ERRORS])
def test_flush_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    one, chain = layer()
    before = one.state.clone()
    given = {"pool": one.state, "slots": torch.tensor([1]), "pending": chain, **change}
    with pytest.raises(error, match=message):
        flush(given.pop("pool"), given.pop("slots"), given.pop("pending"), **given)
    assert_same_bits("nothing was written", one.state, before)
    assert chain.length.tolist() == [2, 6, 4, 0]


def test_append_refuses() -> None:
    one, chain = layer()
    part = verify(one.q, one.k, one.v, **one.arguments)[1]
    accepted = torch.tensor([3, 2, -1])
    for change, message in (
        ({"limit": 9}, "limit: 9 is not allowed; allowed: 0 to the capacity of the chains, 8"),
        ({"limit": True}, "limit: True is not allowed"),
        ({"factors": part.replace(pending=None)}, "verified without a pending chain"),
        ({"accepted": torch.tensor([4, 2, -1])}, r"accepted\[0\] = 4 is outside"),
        ({"slots": torch.tensor([3, 3, -1])}, "both commit to slot 3"),
        ({"factors": [part, part]}, "same number of layers, got 1 and 2"),
    ):
        given = {"pool": one.state, "slots": SLOTS, "factors": part, "accepted": accepted, **change}
        with pytest.raises(ValueError, match=message):
            append(given.pop("pool"), given.pop("slots"), given.pop("factors"), given.pop("accepted"), **given)
    assert chain.length.tolist() == [2, 6, 4, 0]
    other = PendingChain(chain.k, chain.v, chain.gates, chain.length.clone(), chain.start)
    with pytest.raises(ValueError, match=r"pending\[1\]: all layers must share length, start and capacity"):
        append([one.state, one.state.clone()], SLOTS, [part, part.replace(pending=other)], accepted)


def test_exports() -> None:
    assert {"append", "flush", "StateManager", "plan_memory"} <= set(bole_runtime.__all__)


def test_flush_names_what_is_wrong_with_the_gates() -> None:
    tree = TreeBatch(3, 5)
    made = Factors.allocate(
        tree, key_heads=1, value_heads=2, dk=8, dv=8, dtype=torch.float32, recurrence="kda", gate_mode="raw"
    )
    spec, counters = made.spec, [torch.full((3,), n, dtype=torch.int32) for n in (2, 0)]
    node = {i.name: made.gates[i.name] for i in spec.node_gates("raw")}
    chain = PendingChain(made.k, made.v, node, *counters)
    whole = {i.name: torch.zeros(i.sizes((1, 2), (8, 8))) for i in spec.parameters("raw")}
    pool, slots = torch.ones(3, 2, 8, 8), torch.tensor([1])
    cases: list[tuple[Any, type[Exception], str]] = [
        (None, ValueError, "gates: missing A_log, which the chains of 'kda'"),
        ([{**whole, "A_log": torch.zeros(1)}], ValueError, r"gates\['A_log'\]: expected shape \(2,\)"),
        ([{**whole, "A_log": [0.0, 0.0]}], TypeError, r"gates\['A_log'\]: expected a torch.Tensor"),
        ([5], TypeError, r"gates\[0\]: expected a mapping"),
        (5, TypeError, "gates: expected a mapping"),
        ([whole, whole], ValueError, "gates: 2 for 1 layers"),
        (
            {**whole, "A_log": torch.zeros(4)[::2]},
            ValueError,
            r"gates\['A_log'\]: the last dimension must be contiguous",
        ),
        (
            {**whole, "dt_bias": torch.zeros(8, 2).T},
            ValueError,
            r"gates\['dt_bias'\]: the last dimension must be contig",
        ),
        ({**whole, "lower_bound": math.nan}, ValueError, r"gates\['lower_bound'\]: nan is not finite"),
        (
            {**whole, "lower_bound": 5.0},
            ValueError,
            r"gates\['lower_bound'\]: 5.0 is not allowed; allowed: -inf to 0.0",
        ),
        ({**whole, "lower_bound": True}, TypeError, r"gates\['lower_bound'\]: expected a Python float"),
        ({**whole, "lower_bound": "-5"}, TypeError, r"gates\['lower_bound'\]: expected a Python float"),
        ({**whole, "lower_bound": -(10**400)}, ValueError, r"gates\['lower_bound'\]: inf is not finite"),
        ({**whole, "beta_scale": torch.tensor(2.0)}, TypeError, r"gates\['beta_scale'\]: expected a Python float"),
        ({**whole, "lowerbound": -5.0}, ValueError, "gates: lowerbound is no gate of 'kda'; it has A_log, "),
    ]
    for gates, error, message in cases:
        with pytest.raises(error, match=message):
            flush(pool, slots, chain, recurrence="kda", gates=gates)
    with pytest.raises(TypeError, match="qk_l2norm: expected a bool or None, got str"):
        flush(pool, slots, chain, recurrence="kda", gates=whole, qk_l2norm="yes")  # type: ignore[arg-type]
    assert bool((pool == 1).all())
    assert chain.length.tolist() == [2, 2, 2]
    other = pool.clone()
    flush(pool, slots, chain, recurrence="kda", gates=whole)
    assert chain.length.tolist() == [2, 0, 2]
    chain.length.fill_(2)
    flush([other], slots, [chain], recurrence="kda", gates=[whole])
    assert torch.equal(pool, other)
    assert not torch.equal(pool[1], torch.ones(2, 8, 8))  # raw gates of 0 decay it


def test_trees_without_a_row_append_nothing() -> None:
    tree = TreeBatch.from_packed(torch.zeros(0, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), max_nodes=4)
    _, chain = layer()
    q, v = torch.zeros(0, 1, 8), torch.zeros(0, 2, 8)
    gates = {name: torch.zeros(0, 2) for name in ("g", "beta")}
    pool, slots = torch.ones(4, 2, 8, 8), torch.tensor([1, 2])
    chain = PendingChain(
        torch.zeros(4, 8, 1, 8), torch.zeros(4, 8, 2, 8), {n: torch.zeros(4, 8, 2) for n in gates}, chain.length,
        chain.start,
    )  # fmt: skip
    _, part = verify(q, q, v, gates=gates, state=pool, slots=slots, tree=tree, pending=chain)
    assert append(pool, slots, part, torch.tensor([-1, -1])).tolist() == [RowAction.NONE] * 2
    assert chain.length.tolist() == [2, 6, 4, 0]


def test_a_flush_that_was_traced_leaves_nothing_behind() -> None:
    one, chain = layer()
    with FakeTensorMode() as fake:
        traced = [
            fake.from_tensor(t) for t in (one.state, torch.tensor([1]), chain.k, chain.v, chain.length, chain.start)
        ]
        ring = PendingChain(*traced[2:4], {n: fake.from_tensor(t) for n, t in chain.gates.items()}, *traced[4:])
        with contextlib.suppress(Exception):
            flush(traced[0], traced[1], ring, validate=False)
    flush(one.state, torch.tensor([1]), chain)
    assert chain.length.tolist() == [2, 0, 4, 0]
