"""Calls inside CUDA graphs: what a serving loop changes between replays takes effect, nothing waits for the host."""

from __future__ import annotations

import random

import pytest
import torch
from bole_testing.cases.base import NAN, Inputs, Setup, make_inputs, random_parents
from bole_testing.close import assert_close, assert_same_bits
from bole_testing.gpu_plan import CAPTURED, GRAPH_NODES, Setting, graph_layer, graph_tree

from bole_runtime.factors import Factors
from bole_runtime.reference import commit_sequential, verify_sequential

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:bole")]


class Round:
    """One verification and commit of one or several layers in a captured graph, with everything static."""

    def __init__(self, setup: Setup, batch: int, layers: int = 1) -> None:
        self.setup = setup
        self.tree = graph_tree(setup, batch)
        self.layers: list[Inputs] = [graph_layer(setup, self.tree, seed) for seed in range(layers)]
        self.slots = self.layers[0].slots
        self.accepted = torch.zeros(batch, dtype=torch.int32, device="cuda")
        self.pools = [layer.state.clone() for layer in self.layers]
        self.outs = [torch.empty_like(layer.v) for layer in self.layers]
        self.factors: list[Factors] = []
        self._run()  # compiles, and makes the table of the layers
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run()

    def _run(self) -> None:
        self.factors = []
        for layer, pool, out in zip(self.layers, self.pools, self.outs, strict=True):
            arguments = {**layer.arguments, "state": pool, "slots": self.slots, "out": out}
            self.factors.append(self.setup.verify(layer.q, layer.k, layer.v, **arguments)[1])
        one = len(self.pools) == 1
        self.setup.commit(
            self.pools[0] if one else self.pools, self.slots, self.factors[0] if one else self.factors, self.accepted
        )

    def set_inputs(self, seed: int) -> None:
        """Draw new inputs into the same memory."""
        for n, layer in enumerate(self.layers):
            new = make_inputs(self.setup, self.tree, dims=(128, 128), mode="raw", slots=self.slots.tolist(),
                              pool_slots=self.pools[n].shape[0], seed=seed + n)  # fmt: skip
            for name in ("q", "k", "v"):
                getattr(layer, name).copy_(getattr(new, name))
            for name, gate in layer.gates.items():
                gate.copy_(new.gates[name])
            self.pools[n].copy_(new.state)

    def replay_and_check(self) -> None:
        """Replay the graph; compare outputs and states with the float64 recurrence, and the rest bit for bit."""
        before = [pool.clone() for pool in self.pools]
        self.graph.replay()
        accepted = self.accepted.tolist()
        for n, layer in enumerate(self.layers):
            arguments = {**layer.arguments, "state": before[n], "slots": self.slots}
            ref = verify_sequential(layer.q, layer.k, layer.v, **arguments)
            rounding = 2**-8  # of the output's own type, bf16
            assert_close(f"output {n}", self.outs[n].float(), ref, self.setup.output_bound + rounding)
            states = commit_sequential(before[n], self.slots, self.factors[n], self.accepted)
            live = [b for b, s in enumerate(self.slots.tolist()) if s >= 0 and accepted[b] >= 0]
            rows = self.slots[live].long()
            assert_close(f"state {n}", self.pools[n][rows], states[live], self.setup.state_bound)
            others = [s for s in range(before[n].shape[0]) if s not in rows.tolist()]
            assert_same_bits(f"other slots {n}", self.pools[n][others], before[n][others])


@pytest.fixture(params=CAPTURED, ids=str)
def setup(request: pytest.FixtureRequest) -> Setup:
    setting: Setting = request.param
    return setting.setup("cuda")


def _parents(rng: random.Random, batch: int, shape: str) -> torch.Tensor:
    rows = {
        "chain": lambda: list(range(-1, GRAPH_NODES - 1)),
        "star": lambda: [-1] + [0] * (GRAPH_NODES - 1),
        "random": lambda: random_parents(rng, GRAPH_NODES),
        "padded": lambda: random_parents(rng, GRAPH_NODES, padding=0.4),
    }[shape]
    return torch.tensor([rows() for _ in range(batch)], dtype=torch.int32, device="cuda")


def test_topology_and_depth_change_between_replays(setup: Setup) -> None:
    made, rng = Round(setup, 4), random.Random(2)
    for n, shape in enumerate(("chain", "star", "random", "padded", "chain")):
        made.tree.update_(_parents(rng, 4, shape))
        made.set_inputs(10 * n)
        live = made.tree.depths >= 0
        last = torch.where(live, torch.arange(GRAPH_NODES, device="cuda"), -1).amax(1)
        made.accepted.copy_(last)
        made.replay_and_check()


def test_captured_at_batch_4_replayed_with_2_live_rows(setup: Setup) -> None:
    made = Round(setup, 4)
    made.slots[1] = made.slots[3] = -1
    made.set_inputs(3)
    for layer in made.layers:
        for t in (layer.q, layer.k, layer.v, layer.gates["a"], layer.gates["b"]):
            t[[1, 3]] = NAN
    made.accepted.fill_(5)
    made.replay_and_check()
    assert bool((made.outs[0][[1, 3]] == 0).all())


def test_accepted_nodes_change_between_replays(setup: Setup) -> None:
    made = Round(setup, 4)
    for accepted in ([-1, 0, 7, 15], [3, -1, -1, 1], [-1, -1, -1, -1]):
        made.set_inputs(accepted[0] + 20)
        made.accepted.copy_(torch.tensor(accepted))
        made.replay_and_check()


def test_all_layers_in_one_launch(setup: Setup) -> None:
    made = Round(setup, 4, layers=2)
    for seed in (1, 2):
        made.set_inputs(seed)
        made.accepted.copy_(torch.tensor([4, -1, 0, 9]))
        together = [pool.clone() for pool in made.pools]
        for pool, factors in zip(together, made.factors, strict=True):
            setup.commit(pool, made.slots, factors, made.accepted)
        made.replay_and_check()
        for n, (pool, alone) in enumerate(zip(made.pools, together, strict=True)):
            assert_same_bits(f"layer {n}", pool, alone)


def test_no_call_waits_for_the_device(setup: Setup) -> None:
    made = Round(setup, 4, layers=2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made._run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
