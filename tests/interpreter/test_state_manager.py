"""A StateManager on interpreted kernels: every policy against the float64 recurrence, and batch-invariant bits."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bole_testing.cases.base import random_parents
from bole_testing.invariance import Place, check_batch_invariance
from bole_testing.serving import Server

from bole_runtime import LayerGeometry, StateManager, TreeBatch, set_backend
from bole_runtime.calls import CommitCall
from bole_runtime.state import operations
from bole_runtime.state.chain_counters import ChainCounters, ChainRule
from bole_runtime.state.chains import decide

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]

SMALL = LayerGeometry(1, 2, 16, 16)
CONVOLVED = LayerGeometry(1, 2, 16, 16, conv_width=4)
POLICIES: dict[str, dict[str, Any]] = {
    "eager": {"policy": "eager"},
    "fused": {"policy": "fused", "pending": 5},
    "deferred": {"policy": "deferred", "pending": 5},
}


@pytest.mark.parametrize("name", POLICIES)
def test_rounds(name: str) -> None:
    server = Server(30, layers=(CONVOLVED, SMALL), max_batch=2, slots=3, max_nodes=4, max_total=8, **POLICIES[name])
    for _ in range(3):
        server.allocate()
    for _ in range(2):
        server.round()
        server.check()
    server.fork() if server.manager.free_slots else server.copy()
    server.materialise()
    server.check()
    assert server.accepted_tokens > 3
    assert server.longest_walk > 1  # one of the rounds took what an acceptance gave


def test_a_request_gets_the_same_bits_alone_and_in_a_batch() -> None:
    places = (Place(0, 1, 4, 2), Place(1, 2, 7, 6), Place(1, 2, 5, 3, 8))
    sizes = {"slots": 3, "max_batch": 2, "max_nodes": 7, **POLICIES["deferred"]}
    check_batch_invariance(sizes, ends=(3, 1), places=places)


def test_the_pinned_kernel_is_that_of_the_largest_batch() -> None:
    heads = LayerGeometry(16, 32, 16, 16)
    tree = TreeBatch(1, 4)
    gates = {"g": 0, "beta": 0}
    for invariant in (False, True):
        manager = StateManager(
            [heads], slots=64, max_batch=64, max_nodes=4, dtype=torch.float32, batch_invariant=invariant
        )
        alone = manager.kernels.of_verify(heads, gates, tree, None)
        largest = manager.kernels.of_verify(heads, gates, TreeBatch(64, 4), None)
        if invariant:
            assert alone.variant == largest.variant is not None
            assert 0 < alone.scratch == largest.scratch // 64
        else:
            # What is pinned is not what a small batch takes by itself.
            assert alone.variant is largest.variant is None
            assert alone.scratch == 0 < largest.scratch


def test_rounds_made_small_to_large_take_the_scratch_memory_of_the_plan() -> None:
    heads, gates = LayerGeometry(16, 32, 16, 16), {"g": 0, "beta": 0}
    for invariant in (False, True):
        manager = StateManager(
            [heads], slots=64, max_batch=64, max_nodes=40, dtype=torch.float32, batch_invariant=invariant
        )
        planned = manager.memory.scratch
        sizes = [
            manager.kernels.of_verify(heads, gates, TreeBatch(batch, nodes), None).scratch
            for batch, nodes in ((1, 35), (4, 9), (4, 40), (32, 20), (64, 16), (64, 40))
        ]
        for size in sizes:
            manager.scratch.reserve(size)
        assert manager.memory.scratch == planned == 4 * max(sizes) > 4 * sizes[0]


def test_a_flush_takes_the_kernel_of_the_largest_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[CommitCall] = []
    monkeypatch.setattr(operations, "get_backend", lambda *_: SimpleNamespace(commit=calls.append))
    heads = LayerGeometry(16, 32, 16, 16)
    for invariant in (False, True):
        manager = StateManager(
            [heads], slots=64, max_batch=64, max_nodes=2, dtype=torch.float32, batch_invariant=invariant,
            **POLICIES["deferred"],
        )  # fmt: skip
        slots = [manager.allocate() for _ in range(40)]
        rnd = manager.round(TreeBatch.chain(1, 2), torch.tensor(slots[:1], dtype=torch.int32))
        q, k, v = (torch.randn(1, 2, n, 16) for n in (16, 16, 32))
        rnd.verify(0, q, k, v, gates={"g": torch.zeros(1, 2, 32), "beta": torch.ones(1, 2, 32)})
        rnd.commit(torch.tensor([1]))
        manager.materialise(slots[:1])
        manager.materialise()
    free, pinned = [c.variant for c in calls[:2]], [c.variant for c in calls[2:]]
    assert free == [None, None]
    assert pinned[0] == pinned[1] is not None


def test_a_decision_is_that_of_torch() -> None:
    rng = random.Random(3)
    for seed in range(6):
        sizes = [rng.randint(1, 9) for _ in range(5)]
        rows = [random_parents(rng, n, padding=0.2) for n in sizes]
        if seed % 2:
            ends = torch.tensor([sum(sizes[:i]) for i in range(6)])
            tree = TreeBatch.from_packed(torch.tensor([p for row in rows for p in row]), ends, 9)
        else:
            tree = TreeBatch.from_parents(torch.tensor([row + [-2] * (9 - len(row)) for row in rows]))
        slots = torch.tensor(rng.sample([*range(8), -1, -7, 99], 5), dtype=(torch.int32, torch.int64)[seed % 2])
        accepted = torch.tensor([rng.choice([-1, -5, 77, 0, 1, 2, 3, 4]) for _ in range(5)])
        rule = ChainRule(12, rng.choice([4, 8, 12]), consumed=seed % 3 == 0)
        results = []
        for backend in ("triton", "torch"):
            set_backend(backend)
            counters = ChainCounters(8, torch.device("cpu"))
            gen = torch.Generator().manual_seed(seed)
            for t in (counters.length, counters.start):
                t.copy_(torch.randint(0, 12, (8,), generator=gen))
            actions = torch.full((5,), -9, dtype=torch.int32)
            decide(counters, rule, tree, slots, accepted, actions)
            acting = slots[actions > 0].long()
            results.append(
                [
                    actions,
                    counters.length,
                    counters.start,
                    counters.before_length[acting],
                    counters.before_start[acting],
                ]
            )
        set_backend("triton")
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)
