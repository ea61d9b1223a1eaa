"""A StateManager on a GPU: whole rounds in CUDA graphs under every policy, steady memory, and batch-invariant bits."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from bole_testing.captured import SLOTS, StaticRounds
from bole_testing.gpu_states import CAPACITIES, LAYER, POLICIES, bucket_rounds, state_rounds
from bole_testing.invariance import Place, check_batch_invariance

from bole_runtime import StateManager, gpus, plan_memory

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:bole")]


@pytest.mark.parametrize("policy", POLICIES)
def test_rounds_in_a_graph(policy: str) -> None:
    made = state_rounds("cuda", policy)
    for _ in range(24):
        made.play()
    made.finish()


@pytest.mark.parametrize("policy", POLICIES)
def test_graphs_of_several_capacities_take_turns(policy: str) -> None:
    # From the smallest: a later graph must not move what an earlier one reads or writes.
    made = bucket_rounds("cuda", policy)
    before = made.manager.memory
    for _ in range(8):
        for which in range(len(CAPACITIES)):
            made.play(which)
    for _ in range(8):
        made.play(made.rng.randrange(len(CAPACITIES)))
    made.finish()
    assert all(bucket.graph is not None for bucket in made.buckets)
    assert made.manager.memory == before


def steady(made: StaticRounds, rounds: int) -> None:
    """Replay rounds that differ, with forks and flushes between them; compare what torch holds along the way."""
    count = len(made.buckets)
    scripts = []
    for n in range(16 * count):
        which = n % count
        made.draw(which)
        made.replay(which)
        scripts.append((which, [t.clone() for t in made.buckets[which].control]))
    held = []
    for n in range(rounds):
        which, control = scripts[n % len(scripts)]
        for static, value in zip(made.buckets[which].control, control, strict=True):
            static.copy_(value)
        made.replay(which)
        if n % 50 == 0:
            made.manager.materialise([n % SLOTS])
            made.manager.copy((n // 50) % SLOTS, (n // 50 + 1) % SLOTS)
        if (n + 1) % (rounds // 10) == 0:
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
    assert len(set(held)) == 1, held
    assert all(bool(torch.isfinite(pool).all()) for pool in made.manager.request.pools)


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_is_steady_over_ten_thousand_replays(policy: str) -> None:
    steady(bucket_rounds("cuda", policy), 10_000)


def requested() -> int:
    """Return the bytes of all tensors, without what the allocator rounds them up by."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("invariant", [False, True])
def test_the_plan_is_what_a_manager_holds(policy: str, invariant: bool) -> None:
    record = gpus.identify(torch.cuda.get_device_name())
    if record is None:
        pytest.skip("no record of this GPU, so no plan for it")
    sizes: dict[str, Any] = {"slots": 64, "max_batch": 64, "max_nodes": 64, "max_total": 1024, **POLICIES[policy]}
    plan = plan_memory([LAYER] * 2, gpu=record.key, batch_invariant=invariant, **sizes)
    gc.collect()
    before = requested()
    manager = StateManager([LAYER] * 2, batch_invariant=invariant, device="cuda", **sizes)
    assert manager.memory == plan
    assert requested() - before == plan.total


@pytest.mark.parametrize("policy", POLICIES)
def test_a_round_does_not_wait_for_the_device(policy: str) -> None:
    made: StaticRounds = state_rounds("cuda", policy)
    made.play()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("nodes", "most", "policy"), [*((14, 16, policy) for policy in POLICIES), (40, 64, "eager")])
def test_a_request_gets_the_same_bits_alone_and_in_a_batch(nodes: int, most: int, policy: str) -> None:
    binary = [-1, *((i - 1) // 2 for i in range(1, nodes))]
    deep, total = nodes - 1, 64 * nodes + 100
    places = (
        Place(0, 1, nodes, 5),
        Place(2, 4, most, most - 1),
        Place(40, 64, most, deep),
        Place(0, 1, most, deep, nodes),
        Place(9, 10, nodes, 8, 10 * nodes),
        Place(63, 64, most, most - 1, total),
    )
    sizes = {"slots": 64, "max_batch": 64, "max_nodes": most, "max_total": max(total, 64 * most), **POLICIES[policy]}
    ends = (nodes - 1, 0, 5, 2, nodes - 2)
    check_batch_invariance(
        sizes, parents=binary, ends=ends, places=places, layer=LAYER, dtype=torch.bfloat16, device="cuda"
    )
