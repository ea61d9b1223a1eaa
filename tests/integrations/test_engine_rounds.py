"""Rounds over pools of an engine: the same states as token by token, whatever batch sizes take turns."""

from __future__ import annotations

import random

import pytest
import torch
from bole_testing.cases.base import random_parents
from bole_testing.close import assert_close, assert_same_bits

from bole_runtime import LayerGeometry, TreeBatch, commit, conv_commit, tree_conv, verify
from bole_runtime.integrations.engine_rounds import BatchRound, EnginePools, EngineRounds
from bole_runtime.state.copy_slots import copy_slots

LAYERS, SLOTS, NODES, HK, HV, D, W = 3, 9, 7, 1, 2, 8, 4
GEOMETRY = LayerGeometry(key_heads=HK, value_heads=HV, dk=D, dv=D, gate_mode="raw", conv_width=W)
CHANNELS = GEOMETRY.channels


def make_rounds(seed: int = 0) -> EngineRounds:
    torch.manual_seed(seed)
    pools = EnginePools(torch.randn(LAYERS, SLOTS, HV, D, D), torch.randn(LAYERS, SLOTS, CHANNELS, W - 1))
    return EngineRounds(GEOMETRY, pools, nodes=NODES, max_depth=NODES - 1, batch=2, dtype=torch.float32)


def layer_inputs(rows: int) -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(rows, NODES, CHANNELS), "weight": torch.randn(CHANNELS, W), "a": torch.randn(rows, NODES, HV),
        "b": torch.randn(rows, NODES, HV), "A_log": torch.randn(HV), "dt_bias": torch.randn(HV),
    }  # fmt: skip


def run_layer(current: BatchRound, layer: int, given: dict[str, torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    x = current.conv(layer, given["x"], given["weight"], None, slots, "silu")
    q, k, v = (t.unflatten(-1, (-1, D)) for t in x.split((HK * D, HK * D, HV * D), dim=-1))
    gates = {name: given[name] for name in ("a", "b", "A_log", "dt_bias")}
    return current.verify(layer, q, k, v, gates, slots)


def expected(
    pools: EnginePools, layer: int, given: dict[str, torch.Tensor], slots: torch.Tensor, parents: torch.Tensor,
    accepted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """One layer with the plain functions, on copies: output, states, windows."""
    tree = TreeBatch.from_parents(parents, validate=False)
    assert pools.conv is not None
    state, window = pools.states[layer].clone(), pools.conv[layer].clone()
    x, inputs = tree_conv(given["x"], given["weight"], state=window, slots=slots, tree=tree)
    q, k, v = (t.unflatten(-1, (-1, D)) for t in x.split((HK * D, HK * D, HV * D), dim=-1))
    gates = {name: given[name] for name in ("a", "b", "A_log", "dt_bias")}
    out, factors = verify(q, k, v, gates=gates, state=state, slots=slots, tree=tree)
    commit(state, slots, factors, accepted)
    conv_commit(window, slots, inputs, accepted)
    return out, state, window


@pytest.mark.parametrize("track", [False, True])
def test_rounds_of_changing_batch_sizes(track: bool) -> None:
    rounds = make_rounds()
    rng = random.Random(4)
    pools = rounds.pools
    assert pools.conv is not None
    for turn in range(8):
        rows = (2, 4, 1, 4, 3, 2, 4, 1)[turn]  # more than the first buffers have, and fewer again
        live = rows if turn % 2 else max(1, rows - 1)  # a graph's padding rows
        slots = torch.full((rows,), -1, dtype=torch.int32)
        slots[:live] = torch.tensor(rng.sample(range(5), live))
        parents = torch.full((rows, NODES), -2, dtype=torch.int32)
        for b in range(live):
            parents[b] = torch.tensor(random_parents(rng, NODES, roots=0.0, padding=0.1))
        chain = turn == 4
        if chain:
            parents[:] = torch.arange(-1, NODES - 1)
        accepted = torch.full((live,), -1, dtype=torch.int64)
        steps = torch.full((live,), -1, dtype=torch.int64)
        for b in range(live):
            choices = [n for n in range(NODES) if int(parents[b, n]) != -2]
            accepted[b] = rng.choice([*choices, -1]) if choices else -1
            steps[b] = rng.choice([*choices, -1]) if choices else -1
        targets = torch.tensor(rng.sample(range(5, SLOTS), live))
        current = rounds.batch(rows)
        current.set_parents(None if chain else parents)
        given = [layer_inputs(rows) for _ in range(LAYERS)]
        outs, want = [], []
        full = torch.cat([accepted, torch.full((rows - live,), -1)])
        wanted_steps = torch.cat([steps, torch.full((rows - live,), -1)])
        tracked = []
        for n in range(LAYERS):
            outs.append(run_layer(current, n, given[n], slots))
            want.append(expected(pools, n, given[n], slots, parents, full))
            tracked.append(expected(pools, n, given[n], slots, parents, wanted_steps))
        before = pools.states.clone(), pools.conv.clone()
        if track:
            current.commit_copies(slots[:live], targets.to(slots.dtype), steps.to(slots.dtype))
        current.commit(slots[:live], accepted)
        for n in range(LAYERS):
            out, state, window = want[n]
            if track:
                for b in range(live):
                    if steps[b] >= 0:
                        state[targets[b]] = tracked[n][1][slots[b]]
                        window[targets[b]] = tracked[n][2][slots[b]]
            assert_close(f"turn {turn} layer {n} output", outs[n][:live], out[:live].double(), 1e-6)
            assert_close(f"turn {turn} layer {n} states", pools.states[n], state.double(), 1e-6)
            assert_same_bits(f"turn {turn} layer {n} windows", pools.conv[n], window)
        for kept in set(range(SLOTS)) - set(slots.tolist()) - set(targets.tolist()):
            assert_same_bits("another slot", pools.states[:, kept], before[0][:, kept])


def test_copy_slots_copies_rows_that_name_slots() -> None:
    pool = torch.arange(2 * 5 * 6.0).reshape(2, 5, 2, 3)
    want = pool.clone()
    want[:, 3], want[:, 4] = pool[:, 0], pool[:, 1]
    copy_slots(pool, torch.tensor([0, -1, 1, 2, 0]), torch.tensor([3, 2, 4, -1, 9], dtype=torch.int32))
    assert torch.equal(pool, want)
    turned = torch.randn(2, 5, 3, 2).transpose(2, 3)  # a dense block in another order
    want = turned.clone()
    want[:, 4] = turned[:, 0]
    copy_slots(turned, torch.tensor([0]), torch.tensor([4]))
    assert torch.equal(turned, want)
    apart = torch.zeros(2, 5, 2, 8)[..., ::2]
    with pytest.raises(ValueError, match="no dense blocks"):
        copy_slots(apart, torch.tensor([0]), torch.tensor([4]))
    with pytest.raises(ValueError, match="target"):
        copy_slots(pool, torch.tensor([0]), torch.tensor([4, 1]))
    with pytest.raises(TypeError, match="source"):
        copy_slots(pool, torch.tensor([0.0]), torch.tensor([4]))
