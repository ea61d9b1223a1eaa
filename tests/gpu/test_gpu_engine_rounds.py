"""Rounds over an engine's pools on a GPU: the forward in a CUDA graph a batch size, the commit outside it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from bole_testing.cases.base import random_parents
from bole_testing.close import assert_close, assert_same_bits
from bole_testing.slot_pools import check_copies, slot_pools

from bole_runtime import LayerGeometry, TreeBatch
from bole_runtime.integrations.engine_rounds import EnginePools, EngineRounds, RoundMemory
from bole_runtime.reference import commit_sequential, verify_sequential
from bole_runtime.state.buffers import RoundBuffers
from bole_runtime.state.copy_slots import copy_slots

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:bole")]

LAYERS, SLOTS, NODES, W = 2, 9, 16, 4


class Family:
    """Sizes, dtypes and layouts of a family, as an engine has them."""

    def __init__(self, name: str) -> None:
        key_heads, dv = {"gdn": (2, 128), "kda": (4, 128), "mamba2": (2, 64)}[name]
        self.name, self.heads, self.dk = name, 4, 128
        self.geometry = LayerGeometry(
            key_heads=key_heads, value_heads=4, dk=128, dv=dv, recurrence=name, gate_mode="raw", conv_width=W
        )  # fmt: skip
        self.parts = (key_heads * 128, key_heads * 128, 4 * dv)
        self.node_gates: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "gdn": {"a": ((4,), torch.bfloat16), "b": ((4,), torch.bfloat16)},
            "kda": {"f": ((4, 128), torch.bfloat16), "b": ((4,), torch.float32)},
            "mamba2": {"dt_raw": ((4,), torch.bfloat16)},
        }[name]

    def windows(self) -> torch.Tensor:
        channels = self.geometry.channels
        shape = (W - 1, channels) if self.name == "kda" else (channels, W - 1)
        pool = torch.randn(LAYERS, SLOTS, *shape, dtype=torch.bfloat16, device="cuda")
        return pool.transpose(2, 3) if self.name == "kda" else pool

    def parameters(self) -> dict[str, torch.Tensor | float]:
        def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(shape, device="cuda").to(dtype)

        rates = torch.rand(self.heads, device="cuda")
        if self.name == "kda":
            return {"A_log": rates, "dt_bias": new(self.heads, self.dk), "lower_bound": -5.0}
        if self.name == "mamba2":
            brief = torch.bfloat16
            return {"A_log": rates, "dt_bias": new(self.heads, dtype=brief), "D": new(self.heads, dtype=brief)}
        return {"A_log": rates, "dt_bias": new(self.heads)}

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        order = (2, 1, 0) if self.name == "mamba2" else (0, 1, 2)  # x, B, C are v, k, q
        parts = x.split([self.parts[n] for n in order], dim=-1)
        q, k, v = (parts[n] for n in order)
        one = self.geometry
        return q.unflatten(-1, (-1, one.dk)), k.unflatten(-1, (-1, one.dk)), v.unflatten(-1, (-1, one.dv))


class Graph:
    """What an engine captures for one batch size and number of nodes."""

    def __init__(self, family: Family, rounds: EngineRounds, rows: int, weights: list[dict[str, Any]]) -> None:
        def new(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(rows, rounds.nodes, *shape, dtype=dtype, device="cuda")

        self.family, self.current = family, rounds.batch(rows)
        self.slots = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
        self.parents = torch.full((rows, rounds.nodes), -2, dtype=torch.int32, device="cuda")
        self.raw = [new((family.geometry.channels,), torch.bfloat16) for _ in range(LAYERS)]
        self.weights = weights
        self.gates = [
            {**{name: new(*kind) for name, kind in family.node_gates.items()}, **weights[n]["parameters"]}
            for n in range(LAYERS)
        ]
        self.outs: list[torch.Tensor] = []
        self._forward()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._forward()

    def _forward(self) -> None:
        self.current.set_parents(self.parents)
        self.outs, self.x = [], []
        for n in range(LAYERS):
            x = self.current.conv(n, self.raw[n], self.weights[n]["conv"], None, self.slots, "silu")
            self.x.append(x)
            self.outs.append(self.current.verify(n, *self.family.split(x), self.gates[n], self.slots))

    def draw(self) -> None:
        for raw, gates in zip(self.raw, self.gates, strict=True):
            raw.normal_()
            for name in self.family.node_gates:
                gates[name].normal_()


@pytest.mark.parametrize("numbers", [(NODES,), (NODES, 8, 1)])
@pytest.mark.parametrize("name", ["gdn", "kda", "mamba2"])
def test_graphs_take_turns(name: str, numbers: tuple[int, ...]) -> None:
    """Graphs of batch sizes, and of numbers of nodes, over the same pools and factor buffers."""
    torch.manual_seed(3)
    rng = random.Random(3)
    family = Family(name)
    states = torch.randn(LAYERS, SLOTS, *family.geometry.state_shape, device="cuda")
    windows = family.windows()
    pools, memory = EnginePools(states, windows), RoundMemory()
    made = {
        n: EngineRounds(family.geometry, pools, nodes=n, max_depth=n - 1, batch=4, memory=memory) for n in numbers
    }  # fmt: skip
    weights: list[dict[str, Any]] = [
        {
            "conv": torch.randn(
                family.geometry.channels, W, dtype=torch.float32 if name == "kda" else torch.bfloat16, device="cuda"
            ),
            "parameters": family.parameters(),
        }
        for _ in range(LAYERS)
    ]
    graphs = {(n, rows): Graph(family, rounds, rows, weights) for n, rounds in made.items() for rows in (4, 2, 1)}
    for turn in range(12):
        nodes = numbers[(turn // 2) % len(numbers)]
        rows = (4, 2, 4, 1)[turn % 4]
        live = max(1, rows - turn % 3)
        graph = graphs[nodes, rows]
        graph.slots.fill_(-1)
        graph.slots[:live] = torch.tensor(rng.sample(range(5), live))
        parents = [random_parents(rng, nodes, roots=0.0) for _ in range(rows)]
        graph.parents.copy_(torch.tensor(parents))
        graph.draw()
        graph.graph.replay()
        accepted = torch.tensor([rng.randrange(-1, nodes) for _ in range(live)], device="cuda")
        steps = torch.tensor([rng.randrange(-1, nodes) for _ in range(live)], device="cuda")
        targets = torch.tensor(rng.sample(range(5, SLOTS), live), dtype=torch.int32, device="cuda")
        before = states.clone(), windows.clone()
        graph.current.commit_copies(graph.slots[:live], targets, steps.int())
        graph.current.commit(graph.slots[:live], accepted)
        _check(graph, made[nodes], before, live, accepted, steps, targets)
    assert memory.bytes == sum(RoundBuffers.nbytes(made[NODES].config(4)))


def _check(
    graph: Graph, rounds: EngineRounds, before: tuple[torch.Tensor, torch.Tensor], live: int, accepted: torch.Tensor,
    steps: torch.Tensor, targets: torch.Tensor,
) -> None:  # fmt: skip
    slots, tree = graph.slots, TreeBatch.from_parents(graph.parents.cpu())
    used = {int(s) for s in slots[:live]} | {int(t) for t, s in zip(targets, steps, strict=True) if s >= 0}
    (windows,) = rounds.pools.windows
    for n in range(LAYERS):
        arguments: dict[str, Any] = {"state": before[0][n], "slots": slots, "tree": tree}
        want = verify_sequential(
            *graph.family.split(graph.x[n]), gates=graph.gates[n], recurrence=graph.family.name, **arguments
        )
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
                path = [int(nodes[b])]
                while (above := tree.parents[b, path[0]].item()) >= 0:
                    path.insert(0, int(above))
                raw = torch.cat([before[1][n, slots[b]], graph.raw[n][b, path].T], dim=1)
                assert_same_bits("window", windows[n, at[b]].contiguous(), raw[:, -(W - 1) :].contiguous())
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
    for other in slot_pools("cuda").values():
        check_copies(other)
