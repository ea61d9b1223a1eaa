"""Rounds over pools of an engine: the same states as token by token, whatever batch sizes take turns."""

from __future__ import annotations

import random

import pytest
import torch
from bole_testing.cases.base import random_parents
from bole_testing.close import assert_close, assert_same_bits

from bole_runtime import LayerGeometry, TreeBatch, commit, conv_commit, tree_conv, verify
from bole_runtime.integrations.engine_rounds import BatchRound, EnginePools, EngineRounds

LAYERS, SLOTS, NODES, HK, HV, D, W = 3, 9, 7, 1, 2, 8, 4
PARTS = (HK * D, HK * D, HV * D)


def geometry(family: str) -> LayerGeometry:
    return LayerGeometry(
        key_heads=HK, value_heads=HV, dk=D, dv=D, recurrence=family, gate_mode="raw", conv_width=W
    )  # fmt: skip


def windows(family: str) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """One pool for all channels, or for KDA one each for q, k and v, with the channels contiguous."""
    if family != "kda":
        return torch.randn(LAYERS, SLOTS, sum(PARTS), W - 1)
    return tuple(torch.randn(LAYERS, SLOTS, W - 1, size).transpose(2, 3) for size in PARTS)


def make_rounds(family: str = "gdn") -> EngineRounds:
    torch.manual_seed(0)
    pools = EnginePools(torch.randn(LAYERS, SLOTS, HV, D, D), windows(family))
    return EngineRounds(geometry(family), pools, nodes=NODES, max_depth=NODES - 1, batch=2, dtype=torch.float32)


def layer_gates(family: str, rows: int) -> dict[str, torch.Tensor | float]:
    head = {"A_log": torch.randn(HV), "dt_bias": torch.randn(HV)}
    if family == "mamba2":
        return {"dt_raw": torch.randn(rows, NODES, HV), "D": torch.randn(HV), **head}
    b = torch.randn(rows, NODES, HV)
    if family == "kda":
        f, bias = torch.randn(rows, NODES, HV, D), torch.randn(HV, D)
        return {"f": f, "b": b, "A_log": head["A_log"], "dt_bias": bias, "lower_bound": -2.0}
    return {"a": torch.randn(rows, NODES, HV), "b": b, **head}


class LayerInputs:
    """A layer's parameters, which live on, and what a round brings."""

    def __init__(self, family: str) -> None:
        self.weight, self.family = torch.randn(sum(PARTS), W), family
        self.parameters = {n: t for n, t in layer_gates(family, 1).items() if isinstance(t, float) or t.dim() < 3}

    def draw(self, rows: int) -> None:
        self.x = torch.randn(rows, NODES, sum(PARTS))
        self.gates = {**layer_gates(self.family, rows), **self.parameters}


def run_layer(current: BatchRound, layer: int, given: LayerInputs, slots: torch.Tensor, parts: int) -> torch.Tensor:
    if parts == 1:
        q, k, v = current.conv(layer, given.x, given.weight, None, slots, "silu").split(PARTS, dim=-1)
    else:
        columns = zip(given.x.split(PARTS, -1), given.weight.split(PARTS), strict=True)
        q, k, v = (current.conv(layer, x, w, None, slots, "silu", part=n) for n, (x, w) in enumerate(columns))
    q, k, v = (t.unflatten(-1, (-1, D)) for t in (q, k, v))
    return current.verify(layer, q, k, v, given.gates, slots)


def expected(
    rounds: EngineRounds, layer: int, given: LayerInputs, slots: torch.Tensor, parents: torch.Tensor,
    accepted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """One layer with the plain functions, on copies: output, states, windows of all channels."""
    tree = TreeBatch.from_parents(parents, validate=False)
    state = rounds.pools.states[layer].clone()
    window = torch.cat([pool[layer] for pool in rounds.pools.windows], dim=1)
    x, inputs = tree_conv(given.x, given.weight, state=window, slots=slots, tree=tree)
    q, k, v = (t.unflatten(-1, (-1, D)) for t in x.split(PARTS, dim=-1))
    out, factors = verify(q, k, v, gates=given.gates, state=state, slots=slots, tree=tree, recurrence=given.family)
    commit(state, slots, factors, accepted)
    conv_commit(window, slots, inputs, accepted)
    return out, state, window


@pytest.mark.parametrize("track", [False, True])
@pytest.mark.parametrize("family", ["gdn", "kda", "mamba2"])
def test_rounds_of_changing_batch_sizes(family: str, track: bool) -> None:
    rounds = make_rounds(family)
    rng = random.Random(4)
    pools = rounds.pools
    given = [LayerInputs(family) for _ in range(LAYERS)]
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
        for layer in given:
            layer.draw(rows)
        outs, want = [], []
        full = torch.cat([accepted, torch.full((rows - live,), -1)])
        wanted_steps = torch.cat([steps, torch.full((rows - live,), -1)])
        tracked = []
        for n in range(LAYERS):
            outs.append(run_layer(current, n, given[n], slots, len(pools.windows)))
            want.append(expected(rounds, n, given[n], slots, parents, full))
            tracked.append(expected(rounds, n, given[n], slots, parents, wanted_steps))
        before = pools.states.clone()
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
            got = torch.cat([pool[n] for pool in pools.windows], dim=1)
            assert_same_bits(f"turn {turn} layer {n} windows", got, window)
        for kept in set(range(SLOTS)) - set(slots.tolist()) - set(targets.tolist()):
            assert_same_bits("another slot", pools.states[:, kept], before[:, kept])
