"""The memory plan: exact, by lifetime, and steady while rounds go on."""

from __future__ import annotations

import dataclasses
import gc
from itertools import product
from typing import Any

import pytest
import torch
from bole_testing.serving import LAYERS

from bole_runtime import LayerGeometry, StateManager, TreeBatch, get_family, gpus, plan_memory
from bole_runtime.families import KERNEL_FAMILIES
from bole_runtime.kernels.variants import get_variant, served
from bole_runtime.state.buffers import LayerScratch
from bole_runtime.state.config import state_config
from bole_runtime.state.kernels import verify_problem
from bole_runtime.state.scratch import by_tables

QWEN = LayerGeometry(16, 32, 128, 128, conv_width=4)


def held(manager: StateManager) -> int:
    """Return the bytes of every distinct storage that a manager reaches."""
    seen: dict[int, int] = {}
    todo: list[object] = [manager.request, manager.buffers, manager.scratch]
    visited: set[int] = set()
    while todo:
        item = todo.pop()
        if id(item) in visited:
            continue
        visited.add(id(item))
        if isinstance(item, torch.Tensor):
            seen[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, (list, tuple)):
            todo.extend(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
        elif type(item).__module__.startswith("bole_runtime."):
            names = [*getattr(item, "__dict__", {}), *getattr(type(item), "__slots__", ())]
            todo.extend(getattr(item, name) for name in names if name not in ("config", "tree"))
    return sum(seen.values())


@pytest.mark.parametrize("policy", ["eager", "fused", "deferred"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_plan_is_what_is_allocated(policy: str, dtype: torch.dtype) -> None:
    sizes: dict[str, Any] = {"slots": 7, "max_batch": 3, "max_nodes": 9, "max_total": 21, "policy": policy}
    sizes.update(dtype=dtype, state_dtype=dtype, conv_dtype=torch.float32)
    odd = LayerGeometry(1, 3, 5, 7, conv_width=3)
    for layers in (LAYERS, (odd,), (odd, *LAYERS)):
        plan = StateManager.bytes(list(layers), **sizes)
        assert plan == plan_memory(list(layers), **sizes)
        manager = StateManager(list(layers), **sizes)
        assert manager.memory == plan
        assert held(manager) == plan.total == plan.request + plan.round


def test_factors_against_snapshots() -> None:
    # 24 recurrent layers of Qwen3.5-9B, 64 requests with 16 nodes each.
    plan = plan_memory([QWEN] * 24, slots=64, max_batch=64, max_nodes=64, max_total=1024)
    assert plan.states == 64 * 24 * 2 * 2**20
    assert plan.factors == 24 * 1024 * (2 * (16 * 128 + 32 * 128) + 2 * 4 * 32)
    assert plan.snapshots == 1024 * 24 * 2 * 2**20
    assert plan.ratio >= 160
    assert plan.conv_inputs == 24 * 1024 * 8192 * 2
    assert plan.conv_states == 24 * 64 * 8192 * 3 * 2
    text = str(plan)
    assert "snapshots of 1024 nodes instead" in text
    assert f"{plan.ratio:.1f} times smaller" in text


def test_factors_are_for_the_nodes_of_a_batch() -> None:
    sizes = {"slots": 64, "max_batch": 64, "max_nodes": 64}
    narrow, wide = (plan_memory([QWEN], max_total=n, **sizes) for n in (1024, 4096))
    assert wide.factors == 4 * narrow.factors
    assert plan_memory([QWEN], **sizes).factors == wide.factors


def test_a_deferred_chain_costs_a_ring_a_slot() -> None:
    sizes: dict[str, Any] = {"slots": 8, "max_batch": 4, "max_nodes": 16}
    eager = plan_memory([QWEN], **sizes)
    deferred = plan_memory([QWEN], policy="deferred", pending=32, **sizes)
    assert deferred.chains - eager.chains == 8 * 32 * (2 * (16 * 128 + 32 * 128) + 2 * 4 * 32)
    assert deferred.states == eager.states


def test_families_without_kernels_take_no_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = get_family("rwkv7")
    layer = LayerGeometry(4, 4, 16, 16, recurrence=dataclasses.replace(spec, kernels=False))
    sizes: dict[str, Any] = {"slots": 64, "max_batch": 64, "max_nodes": 16}
    assert plan_memory([layer], gpu="h200", **sizes).scratch == 0
    manager = StateManager([layer], **sizes, batch_invariant=True, device="cpu")
    monkeypatch.setattr("bole_runtime.state.kernels.backend_name", lambda device: "triton")
    gates = dict.fromkeys(i.name for i in layer.spec.node_gates("ready"))
    assert manager.kernels.of_verify(layer, gates, TreeBatch(2, 4), None) == (0, None)


def test_scratch_memory_of_a_gpu() -> None:
    sizes: dict[str, Any] = {"slots": 64, "max_batch": 64, "max_nodes": 16}
    assert plan_memory([QWEN], **sizes).scratch == 0
    # R of 16 x 16 a head and request, and the weights of a row.
    assert plan_memory([QWEN], gpu="h200", **sizes).scratch >= 4 * 64 * 32 * 16 * 16


@pytest.mark.parametrize("precision", ["fast", "lossless"])
def test_no_round_takes_more_scratch_memory_than_the_plan(precision: str) -> None:
    sizes: dict[str, Any] = {"slots": 64, "max_batch": 64, "max_nodes": 64, "precision": precision}
    layer = LayerGeometry(16, 32, 128, 128, gate_mode="raw")
    config, choose = state_config([layer], **sizes), by_tables("NVIDIA H200", gpus.get("h200").limits())

    def elements(nodes: int, depth: int, batch: int) -> int:
        problem = verify_problem(config, layer, "raw", nodes, depth, batch, True)
        chosen = choose(problem)
        return sum(get_variant("verify", chosen.variant).workspace(problem, chosen, batch, 32))

    counts = (1, 2, 3, 7, 8, 20, 33, 64)
    needs = [elements(n, min(d, n - 1), b) for b in counts for n in (1, 9, 16, 25, 40, 64) for d in (3, 15, 63)]
    plan = plan_memory([layer], gpu="h200", **sizes)
    assert plan.scratch == 4 * max(needs) > 4 * needs[0]
    assert plan_memory([layer], gpu="h200", batch_invariant=True, **sizes).scratch == 4 * elements(64, 63, 64)


@pytest.mark.parametrize("invariant", [False, True], ids=["by_tree", "batch_invariant"])
@pytest.mark.parametrize("family", KERNEL_FAMILIES)
def test_the_plan_covers_both_settings_of_qk_l2norm(family: str, invariant: bool) -> None:
    choose = by_tables("NVIDIA H200", gpus.get("h200").limits())
    for dk, nodes, dtype in ((128, 64, torch.bfloat16), (64, 40, torch.float32), (16, 200, torch.float32)):
        layer = LayerGeometry(4, 4, dk, 64, recurrence=family)
        sizes: dict[str, Any] = {"slots": 9, "max_batch": 9, "max_nodes": nodes, "dtype": dtype}
        config, most = state_config([layer], **sizes), 0
        for mode, norm, batch in product(layer.spec.modes, (False, True), (1, 9)):
            for n in (nodes,) if invariant else (1, 16, 17, 33, nodes):
                chosen_for = 9 if invariant else batch
                problem = verify_problem(config, layer, mode, n, n - 1, chosen_for, norm)
                if served(problem):
                    chosen = choose(problem)
                    most = max(most, sum(get_variant("verify", chosen.variant).workspace(problem, chosen, batch, 4)))
        assert plan_memory([layer], gpu="h200", batch_invariant=invariant, **sizes).scratch >= 4 * most


def test_scratch_memory_is_reserved_once() -> None:
    # Buffers that grew with the rounds would add up: one that a captured graph holds cannot be given back.
    scratch = LayerScratch(torch.device("cpu"), 4000)
    taken = [scratch.reserve(n) for n in (1000, 2000, 4000)]
    assert scratch.reserve(0) is None
    assert len({t.data_ptr() for t in taken if t is not None}) == 1
    assert scratch.nbytes == 16000
    grown = scratch.reserve(5000)  # kernels chosen later may take more
    assert grown is not None
    assert grown.numel() == 5000
    assert scratch.nbytes == 36000


@pytest.mark.parametrize("policy", ["eager", "fused", "deferred"])
def test_memory_is_steady(policy: str) -> None:
    play(policy, 75)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", ["eager", "fused", "deferred"])
def test_memory_is_steady_over_ten_thousand_rounds(policy: str) -> None:
    play(policy, 10_000)


def play(policy: str, count: int) -> None:
    layer = LAYERS[0]
    manager = StateManager([layer], slots=3, max_batch=2, max_nodes=3, dtype=torch.float32, policy=policy)
    rnd = manager.round(TreeBatch.chain(2, 3), torch.tensor([manager.allocate(), manager.allocate()]))
    x, weight = torch.ones(2, 3, layer.channels), torch.ones(layer.channels, 4)
    q, v, gates = torch.ones(2, 3, 1, 8), torch.ones(2, 3, 2, 8), {n: torch.zeros(2, 3, 2) for n in ("g", "beta")}
    counts = []
    for n in range(count):
        rnd.conv(0, x, weight)
        rnd.verify(0, q, q, v, gates=gates)
        rnd.commit(torch.tensor([n % 3, -1]))
        if n % 10 == 0:
            manager.free(manager.fork(0))
        if (n + 1) % (count // 3) == 0:
            gc.collect()
            counts.append((sum(type(o) is torch.Tensor for o in gc.get_objects()), held(manager)))
    assert counts[0] == counts[1] == counts[2]
