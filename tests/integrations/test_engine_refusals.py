"""What rounds over an engine's pools refuse, with nothing written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from bole_testing.engine_models import (
    CHANNELS,
    HV,
    LAYER,
    LAYERS,
    NODES,
    SLOTS,
    D,
    W,
    engine_pools,
    engine_rounds,
    forward,
)

from bole_runtime import LayerGeometry
from bole_runtime.integrations.engine_rounds import BatchRound, EnginePools, EngineRounds
from bole_runtime.integrations.vllm import GroupPools, PageLayout


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@contextmanager
def nothing_written(pools: EnginePools) -> Iterator[None]:
    tensors = (pools.states, *pools.windows)
    before = [t.clone() for t in tensors]
    yield
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


def refused_both(pools: EnginePools, current: BatchRound, match: str) -> None:
    with nothing_written(pools):
        with pytest.raises(RuntimeError, match=match):
            current.commit_copies(ints(1, 2), ints(4, 5), ints(1, 1))
        with pytest.raises(RuntimeError, match=match):
            current.commit(ints(1, 2), ints(1, 1))


def test_half_a_forward_is_refused_in_the_first_round_and_later() -> None:
    pools = engine_pools()
    current = engine_rounds(pools).batch(2)
    slots = ints(1, 2)
    refused_both(pools, current, "0 of 2 layers were verified with 2 rows")
    forward(current, slots, [1])
    refused_both(pools, current, "1 of 2 layers were verified with 2 rows")
    forward(current, slots, [0], trees=False)
    current.commit(slots, ints(1, 1))
    for trees in (True, False):
        forward(current, slots, [0], trees=trees)
        refused_both(pools, current, "1 of 2 layers")
    forward(current, slots, conv=False)
    refused_both(pools, current, "0 of 2 convolutions were computed")
    with pytest.raises(ValueError, match="layer: -1"):
        forward(current, slots, [-1])
    forward(current, slots)
    current.commit(slots, ints(1, 1))


def test_a_commit_without_python_before_it_is_one_after_a_replay() -> None:
    pools = engine_pools()
    current = engine_rounds(pools).batch(2)
    slots = ints(1, 2)
    forward(current, slots)
    current.commit(slots, ints(1, 1))
    current.commit_copies(slots, ints(4, 5), ints(0, 1))
    current.commit(slots, ints(0, -1))
    current.set_parents(None)  # outside the graph
    current.commit(slots, ints(0, 0))
    forward(current, slots, [0])
    refused_both(pools, current, "1 of 2 layers")
    current.abandon()
    current.commit(slots, ints(0, 0))


def test_values_out_of_range_are_refused_on_a_cpu() -> None:
    pools = engine_pools()
    current = engine_rounds(pools).batch(2)
    forward(current, ints(1, 2))
    with nothing_written(pools):
        for slots, accepted, match in (
            (ints(1, SLOTS), ints(0, 0), "slots\\[1\\] = 6"),
            (ints(-2, 2), ints(0, 0), "slots\\[0\\] = -2"),
            (ints(1, 1), ints(0, 0), "both commit to slot 1"),
            (ints(1, 2), ints(0, NODES), "accepted\\[1\\] = 4"),
            (ints(1), ints(-2), "accepted\\[0\\] = -2"),
            (ints(1, 2), ints(0), "accepted: expected shape"),
            (ints(1, 2, 3), ints(0, 0, 0), "slots: 3 entries for a batch of 2 rows"),
        ):
            with pytest.raises(ValueError, match=match):
                current.commit(slots, accepted)
            with pytest.raises(ValueError, match=match):
                current.commit_copies(slots, ints(3, 4, 5)[: slots.shape[0]], accepted)
        for targets, match in (
            (ints(4, SLOTS), "targets\\[1\\] = 6 is outside 0 to 5"),
            (ints(-1, 4), "targets\\[0\\] = -1"),
            (ints(4, 4), "rows 0 and 1 both copy to slot 4"),
            (ints(2, 4), "targets\\[0\\] = 2 is the slot of a request"),
            (ints(4), "targets: expected shape"),
        ):
            with pytest.raises(ValueError, match=match):
                current.commit_copies(ints(1, 2), targets, ints(0, 0))
        for wrong in (torch.tensor([1.0, 2.0]), [1, 2]):
            with pytest.raises(TypeError, match="slots"):
                current.commit(wrong, ints(0, 0))  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="accepted"):
                current.commit_copies(ints(1, 2), ints(4, 5), wrong)  # type: ignore[arg-type]
        current.commit_copies(ints(-1, 2), ints(4, 5), ints(1, -1))  # neither row names a source and a node
        current.commit(ints(), ints())


STATES, WINDOWS = (LAYERS, SLOTS, HV, D, D), (LAYERS, SLOTS, CHANNELS, W - 1)


@pytest.mark.parametrize(
    ("states", "conv", "match"),
    [
        (STATES[1:], WINDOWS, r"pools.states: expected \[layers, slots, HV, dv, dk\], got shape \(6, 2, 8, 8\)"),
        ((0, *STATES[1:]), (0, *WINDOWS[1:]), "pools.states: expected"),
        ((LAYERS, SLOTS, HV + 1, D, D), WINDOWS, r"pools.states\[0\]: expected shape \(6, 2, 8, 8\)"),
        (STATES, (LAYERS, SLOTS, CHANNELS, W), "pools.conv: windows of 4 inputs, expected W - 1 = 3"),
        (STATES, (LAYERS + 1, *WINDOWS[1:]), r"pools.conv: expected \(2, 6, C, W - 1\), got shape \(3, 6, 32, 3\)"),
        (STATES, (LAYERS, SLOTS - 1, *WINDOWS[2:]), r"pools.conv: expected \(2, 6, C, W - 1\)"),
        (STATES, WINDOWS[1:], "pools.conv: expected"),
        (STATES, (LAYERS, SLOTS, 9, W - 1), "9 channels of convolutions, where the layer has 32"),
    ],
)
def test_pools_that_do_not_fit_the_layer(states: tuple[int, ...], conv: tuple[int, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        engine_rounds(EnginePools(torch.zeros(states), torch.zeros(conv)))


def test_pools_of_wrong_types_and_shared_memory() -> None:
    states, conv = torch.zeros(STATES), torch.zeros(WINDOWS)
    with pytest.raises(TypeError, match=r"pools\.states"):
        engine_rounds(EnginePools([states], conv))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pools\.conv"):
        engine_rounds(EnginePools(states, [conv]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pools.conv\[0\]\[0\]: dtype torch.int32"):
        engine_rounds(EnginePools(states, (conv.int(),)))
    with pytest.raises(TypeError, match="pools: expected an EnginePools"):
        engine_rounds(states)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"pools\.states: expanded"):
        engine_rounds(EnginePools(states[:1].expand(STATES), conv))
    memory = torch.zeros(STATES).flatten()
    with pytest.raises(ValueError, match="overlaps"):
        engine_rounds(EnginePools(memory.view(STATES), memory[: conv.numel()].view(WINDOWS)))
    with pytest.raises(ValueError, match="32 channels of convolutions, where the layer has 0"):
        engine_rounds(EnginePools(states, conv), LayerGeometry(1, HV, D, D, gate_mode="raw"))


def test_sizes_that_are_not_allowed() -> None:
    rounds = engine_rounds(engine_pools())
    for rows, error in ((0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="rows"):
            rounds.batch(rows)  # type: ignore[arg-type]
    for name, wrong in (("nodes", 0), ("nodes", 1000), ("max_depth", -1), ("precision", "exact")):
        sizes = {"nodes": NODES, "max_depth": 3, "batch": 2, "dtype": torch.float32, name: wrong}
        with pytest.raises(ValueError, match=name):
            EngineRounds(LAYER, engine_pools(), **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("by_block", [False, True], ids=["layers_apart", "layers_of_a_block_together"])
@pytest.mark.parametrize("order", ["SD", "DS"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_copies_on_pages_of_vllm(order: str, drafts: int, by_block: bool) -> None:
    layout = PageLayout(LAYER, drafts=drafts, conv_dtype=torch.float32, conv_order=order)
    shape = (SLOTS, LAYERS, layout.nbytes + 64) if by_block else (LAYERS, SLOTS, layout.nbytes + 64)
    pages = torch.zeros(shape, dtype=torch.int8)
    bound = GroupPools.bind(layout, [layout.split(p) for p in (pages.transpose(0, 1) if by_block else pages)])
    pools = bound.engine
    given = engine_pools()
    for mine, theirs in zip((pools.states, *pools.windows), (given.states, *given.windows), strict=True):
        mine.copy_(theirs)
    results = []
    for each in (pools, given):
        torch.manual_seed(7)
        current = engine_rounds(each).batch(2)
        forward(current, ints(1, 2))
        current.commit_copies(ints(1, 2), ints(4, 5), ints(1, -1))
        current.commit(ints(1, 2), ints(2, 0))
        results.append((each.states.clone(), each.windows[0].clone()))
    for got, want, before in zip(*results, (torch.zeros(1), torch.zeros(1)), strict=True):
        assert torch.equal(got, want)
        assert not torch.equal(got[:, 4], before.expand_as(got[:, 4]))
