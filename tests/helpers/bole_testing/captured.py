"""Rounds of a StateManager with static inputs, which a CUDA graph can hold; on a CPU the calls are repeated."""

from __future__ import annotations

import random
from typing import Any

import torch

from bole_runtime import Factors, LayerGeometry, StateManager, TreeBatch
from bole_runtime.reference import commit_sequential, verify_sequential
from bole_testing.cases.base import random_parents
from bole_testing.close import assert_close, assert_same_bits

BATCH, NODES, SLOTS = 4, 14, 6


class StaticRounds:
    """Two layers with convolutions; every round draws inputs, trees, slots and accepted nodes into the same memory.

    Args:
        device: a CUDA device captures a graph at the first round.
        seed: of what is drawn.
        layer: geometry of both layers.
        bounds: relative errors allowed for outputs and states.
        **sizes: of the manager.
    """

    def __init__(
        self,
        device: str,
        seed: int,
        layer: LayerGeometry,
        *,
        dtype: torch.dtype,
        bounds: tuple[float, float],
        precision: str = "lossless",
        **sizes: Any,
    ) -> None:
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.device, self.layer, self.dtype, self.bounds = torch.device(device), layer, dtype, bounds
        self.manager = StateManager(
            [layer, layer], slots=SLOTS, max_batch=BATCH, max_nodes=NODES, max_total=BATCH * NODES - 6, dtype=dtype,
            precision=precision, device=device, **sizes,
        )  # fmt: skip
        for _ in range(SLOTS):
            self.manager.allocate()
        self.tree = TreeBatch(BATCH, NODES, max_total=BATCH * NODES - 6, device=device, validate=False)
        self.slots = torch.full((BATCH,), -1, dtype=torch.int32, device=device)
        self.accepted = torch.full((BATCH,), -1, dtype=torch.int32, device=device)
        self.parents = torch.full((self.tree.max_total,), -2, dtype=torch.int32, device=device)
        self.offsets = torch.zeros(BATCH + 1, dtype=torch.int32, device=device)
        self.round = self.manager.round(self.tree, self.slots)
        self.states = [torch.zeros(SLOTS, *layer.state_shape, dtype=torch.float64) for _ in range(2)]
        self.weight = self._normal(layer.channels, layer.conv_width).to(device)
        shapes = {
            "x": (layer.channels,), "q": (layer.key_heads, layer.dk), "k": (layer.key_heads, layer.dk),
            "v": (layer.value_heads, layer.dv), "a": (layer.value_heads,), "b": (layer.value_heads,),
        }  # fmt: skip
        rows = self.tree.max_total
        self.inputs = [{n: torch.zeros(rows, *s, dtype=dtype, device=device) for n, s in shapes.items()} for _ in "ab"]
        heads = layer.value_heads
        self.fixed = {
            "A_log": torch.linspace(-2, 1, heads).to(device),
            "dt_bias": torch.full((heads,), -2.0).to(device),
        }
        self.outs = [torch.zeros(rows, heads, layer.dv, device=device) for _ in range(2)]
        self.graph: torch.cuda.CUDAGraph | None = None

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def run(self) -> None:
        """The calls of a round, the rebuild of the trees included."""
        self.tree.update_(self.parents, self.offsets)
        for n, given in enumerate(self.inputs):
            self.round.conv(n, given["x"], self.weight)
            gates = {"a": given["a"], "b": given["b"], **self.fixed}
            self.round.verify(n, given["q"], given["k"], given["v"], gates=gates, out=self.outs[n])
        self.round.commit(self.accepted)

    def _draw(self) -> None:
        sizes = [self.rng.randint(1, NODES - 3) for _ in range(BATCH)]
        rows = [random_parents(self.rng, n, padding=0.1) for n in sizes]
        flat = [p for row in rows for p in row]
        self.parents.copy_(torch.tensor(flat + [-2] * (self.tree.max_total - len(flat))))
        self.offsets.copy_(torch.tensor([sum(sizes[:i]) for i in range(BATCH + 1)]))
        slots = self.rng.sample(range(SLOTS), BATCH)
        slots[self.rng.randrange(BATCH)] = -1
        self.slots.copy_(torch.tensor(slots))
        live = [[i for i, p in enumerate(row) if p != -2] for row in rows]
        self.accepted.copy_(torch.tensor([self.rng.choice([-1, *nodes, *nodes]) for nodes in live]))
        for given in self.inputs:
            for t in given.values():
                t.copy_(self._normal(*t.shape))

    def play(self) -> None:
        """Draw a round, run or replay it, and compare with the float64 recurrence."""
        self._draw()
        convs = [c.clone() for c in self.manager.request.conv_pools if c is not None]
        if self.device.type != "cuda":
            self.run()
        elif self.graph is None:
            self.run()  # compiles, and builds the descriptor tables
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.run()
        else:
            self.graph.replay()
        self._check(convs)

    def _check(self, convs: list[torch.Tensor]) -> None:
        tree = TreeBatch.from_packed(self.parents.cpu(), self.offsets.cpu(), NODES)
        slots, accepted = self.slots.cpu(), self.accepted.cpu()
        rows, live = tree.rows()
        kept = rows[live & (slots >= 0).unsqueeze(1)]
        spec = self.layer.spec
        written = [(b, int(s), int(a)) for b, (s, a) in enumerate(zip(slots, accepted, strict=True)) if s >= 0 <= a]
        for n, given in enumerate(self.inputs):
            q, k, v, a, b = (given[name].cpu() for name in ("q", "k", "v", "a", "b"))
            gates = {"a": a, "b": b, **{name: t.cpu() for name, t in self.fixed.items()}}
            exact = verify_sequential(q, k, v, gates=gates, state=self.states[n], slots=slots, tree=tree)
            assert_close(f"output {n}", self.outs[n].cpu()[kept], exact[kept], self.bounds[0])
            part = Factors(spec, "raw", k, v, gates, 1.0, spec.qk_l2norm, tree)
            new = commit_sequential(self.states[n], slots, part, accepted)
            conv = self.manager.request.conv_pools[n]
            assert conv is not None
            for row, slot, node in written:
                self.states[n][slot] = new[row]
                path = [int(tree.offsets[row]) + i for i in tree.path(row, node)]  # type: ignore[index]
                want = torch.cat((convs[n][slot].cpu(), given["x"].cpu()[path].T), 1)[:, -conv.shape[2] :]
                assert_same_bits(f"convolution {n}", conv[slot].cpu(), want)
            others = [s for s in range(SLOTS) if s not in {slot for _, slot, _ in written}]
            assert_same_bits(f"other convolutions {n}", conv[others], convs[n][others])

    def finish(self) -> None:
        """Fold every chain and compare the states."""
        self.manager.materialise()
        for n, (pool, exact) in enumerate(zip(self.manager.request.pools, self.states, strict=True)):
            assert_close(f"states {n}", pool.cpu(), exact, self.bounds[1])
