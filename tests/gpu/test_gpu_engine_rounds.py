"""Rounds over an engine's pools on a GPU: the forward in a CUDA graph a batch size, the commit outside it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from bole_testing.cases.base import random_parents
from bole_testing.close import assert_close, assert_same_bits

from bole_runtime import LayerGeometry, TreeBatch
from bole_runtime.integrations.engine_rounds import EnginePools, EngineRounds
from bole_runtime.reference import commit_sequential, verify_sequential
from bole_runtime.state.copy_slots import copy_slots

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:bole")]

LAYERS, SLOTS, NODES, HK, HV, D, W = 2, 9, 16, 2, 4, 128, 4
GEOMETRY = LayerGeometry(key_heads=HK, value_heads=HV, dk=D, dv=D, gate_mode="raw", conv_width=W)
CHANNELS = GEOMETRY.channels


class Graph:
    """What an engine captures for one batch size."""

    def __init__(self, rounds: EngineRounds, rows: int, weights: list[dict[str, torch.Tensor]]) -> None:
        def new(*shape: int) -> torch.Tensor:
            return torch.zeros(rows, NODES, *shape, dtype=torch.bfloat16, device="cuda")

        self.current = rounds.batch(rows)
        self.slots = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
        self.parents = torch.full((rows, NODES), -2, dtype=torch.int32, device="cuda")
        self.given = [{"x": new(CHANNELS), "a": new(HV), "b": new(HV), **weights[n]} for n in range(LAYERS)]
        self.outs: list[torch.Tensor] = []
        self._forward()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._forward()

    def _forward(self) -> None:
        self.current.set_parents(self.parents)
        self.outs, self.x = [], []
        for n, given in enumerate(self.given):
            x = self.current.conv(n, given["x"], given["weight"], None, self.slots, "silu")
            q, k, v = (t.unflatten(-1, (-1, D)) for t in x.split((HK * D, HK * D, HV * D), dim=-1))
            gates = {name: given[name] for name in ("a", "b", "A_log", "dt_bias")}
            self.x.append(x)
            self.outs.append(self.current.verify(n, q, k, v, gates, self.slots))


def test_graphs_of_batch_sizes_take_turns() -> None:
    torch.manual_seed(3)
    rng = random.Random(3)
    states = torch.randn(LAYERS, SLOTS, HV, D, D, device="cuda")
    windows = torch.randn(LAYERS, SLOTS, CHANNELS, W - 1, dtype=torch.bfloat16, device="cuda")
    rounds = EngineRounds(GEOMETRY, EnginePools(states, windows), nodes=NODES, max_depth=NODES - 1, batch=2)
    weights: list[dict[str, torch.Tensor]] = [
        {
            "weight": torch.randn(CHANNELS, W, dtype=torch.bfloat16, device="cuda"),
            "A_log": torch.rand(HV, device="cuda"), "dt_bias": torch.randn(HV, device="cuda"),
        }
        for _ in range(LAYERS)
    ]  # fmt: skip
    graphs = {rows: Graph(rounds, rows, weights) for rows in (4, 2, 1)}
    for turn in range(12):
        rows = (4, 2, 4, 1)[turn % 4]
        live = max(1, rows - turn % 3)
        graph = graphs[rows]
        graph.slots.fill_(-1)
        graph.slots[:live] = torch.tensor(rng.sample(range(5), live))
        parents = [random_parents(rng, NODES, roots=0.0) for _ in range(rows)]
        graph.parents.copy_(torch.tensor(parents))
        for given in graph.given:
            for name in ("x", "a", "b"):
                given[name].normal_()
        graph.graph.replay()
        accepted = torch.tensor([rng.randrange(-1, NODES) for _ in range(live)], device="cuda")
        steps = torch.tensor([rng.randrange(-1, NODES) for _ in range(live)], device="cuda")
        targets = torch.tensor(rng.sample(range(5, SLOTS), live), dtype=torch.int32, device="cuda")
        before = states.clone(), windows.clone()
        graph.current.commit_copies(graph.slots[:live], targets, steps.int())
        graph.current.commit(graph.slots[:live], accepted)
        _check(graph, rounds, before, live, accepted, steps, targets)


def _check(
    graph: Graph, rounds: EngineRounds, before: tuple[torch.Tensor, torch.Tensor], live: int, accepted: torch.Tensor,
    steps: torch.Tensor, targets: torch.Tensor,
) -> None:  # fmt: skip
    slots, tree = graph.slots, TreeBatch.from_parents(graph.parents.cpu())
    used = {int(s) for s in slots[:live]} | {int(t) for t, s in zip(targets, steps, strict=True) if s >= 0}
    for n, given in enumerate(graph.given):
        arguments: dict[str, Any] = {"state": before[0][n], "slots": slots, "tree": tree}
        q, k, v = (t.unflatten(-1, (-1, D)) for t in graph.x[n].split((HK * D, HK * D, HV * D), dim=-1))
        gates = {name: given[name] for name in ("a", "b", "A_log", "dt_bias")}
        want = verify_sequential(q, k, v, gates=gates, **arguments)
        assert_close("output", graph.outs[n][:live], want[:live], 2**-8)
        factors = graph.current.factors[n]
        for nodes, at in ((accepted, slots[:live]), (steps, targets)):
            full = torch.full((slots.shape[0],), -1, device="cuda")
            full[:live] = nodes
            state = commit_sequential(before[0][n], slots, factors, full)
            for b in range(live):
                if nodes[b] < 0:
                    continue
                assert_close("state", rounds.pools.states[n, at[b]], state[b], 1e-6)
                assert rounds.pools.conv is not None
                path = [int(nodes[b])]
                while (above := tree.parents[b, path[0]].item()) >= 0:
                    path.insert(0, int(above))
                raw = torch.cat([before[1][n, slots[b]], given["x"][b, path].T], dim=1)
                assert_same_bits("window", rounds.pools.conv[n, at[b]], raw[:, -(W - 1) :].contiguous())
        for kept in set(range(SLOTS)) - used:
            assert_same_bits("another slot", rounds.pools.states[n, kept], before[0][n, kept])


def test_copy_slots() -> None:
    for dtype, shape in ((torch.float32, (3, 6, 4, 128, 128)), (torch.bfloat16, (3, 6, 1000, 3))):
        pool = torch.randn(shape, device="cuda").to(dtype)
        want = pool.clone()
        want[:, 3], want[:, 4] = pool[:, 0], pool[:, 1]
        source = torch.tensor([0, -1, 1, 2, 0], device="cuda")
        copy_slots(pool, source, torch.tensor([3, 2, 4, -1, 9], dtype=torch.int32, device="cuda"))
        assert_same_bits("pool", pool, want)
    turned = torch.randn(2, 5, 3, 200, device="cuda").transpose(2, 3)
    want = turned.clone()
    want[:, 4] = turned[:, 0]
    copy_slots(turned, torch.tensor([0], device="cuda"), torch.tensor([4], device="cuda"))
    assert_same_bits("pool", turned, want)
