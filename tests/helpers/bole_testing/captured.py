"""Rounds of a StateManager with static inputs, which CUDA graphs can hold; on a CPU the calls are repeated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from bole_runtime import Factors, LayerGeometry, StateManager, TreeBatch
from bole_runtime.reference import commit_sequential, verify_sequential
from bole_runtime.tree import Capacity
from bole_testing.cases.base import random_parents
from bole_testing.close import assert_close, assert_same_bits

BATCH, NODES, SLOTS = 4, 14, 6
#: One graph for everything.
WHOLE = Capacity(max_total=BATCH * NODES - 6, max_batch=BATCH, max_nodes=NODES, max_depth=NODES - 1)


class Bucket:
    """What one graph reads and writes: trees of a capacity, inputs, outputs.

    Attributes:
        capacity: of the trees.
        tree: rebuilt in the graph from ``parents`` and ``offsets``.
        round: of the manager that all buckets share.
        graph: after the first round on a GPU.
    """

    def __init__(
        self, manager: StateManager, capacity: Capacity, layer: LayerGeometry, shapes: dict[str, tuple[int, ...]]
    ) -> None:
        device, dtype = manager.device, manager.config.dtype
        self.capacity, rows, batch = capacity, capacity.max_total, capacity.max_batch
        self.tree = capacity.tree(device, validate=False)
        self.slots = torch.full((batch,), -1, dtype=torch.int32, device=device)
        self.accepted = torch.full((batch,), -1, dtype=torch.int32, device=device)
        self.parents = torch.full((rows,), -2, dtype=torch.int32, device=device)
        self.offsets = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        self.round = manager.round(self.tree, self.slots)
        self.inputs = [{n: torch.zeros(rows, *s, dtype=dtype, device=device) for n, s in shapes.items()} for _ in "ab"]
        self.outs = [torch.zeros(rows, layer.value_heads, layer.dv, device=device) for _ in range(2)]
        self.graph: torch.cuda.CUDAGraph | None = None

    @property
    def control(self) -> tuple[torch.Tensor, ...]:
        """What says who is served and how: a copy of these, copied back, is another round."""
        return self.parents, self.offsets, self.slots, self.accepted


class StaticRounds:
    """Two layers with convolutions; every round draws inputs, trees, slots and accepted nodes into the same memory.

    Args:
        device: a CUDA device captures a graph a capacity, at its first round.
        seed: of what is drawn.
        layer: geometry of both layers.
        bounds: relative errors allowed for outputs and states.
        capacities: of the graphs; all are of one manager, and share a memory pool.
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
        capacities: Sequence[Capacity] = (WHOLE,),
        **sizes: Any,
    ) -> None:
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.device, self.layer, self.bounds = torch.device(device), layer, bounds
        most = {name: max(getattr(c, name) for c in capacities) for name in ("max_batch", "max_nodes", "max_total")}
        self.manager = StateManager(
            [layer, layer], slots=SLOTS, **most, dtype=dtype, precision=precision, device=device, **sizes
        )
        for _ in range(SLOTS):
            self.manager.allocate()
        self.states = [torch.zeros(SLOTS, *layer.state_shape, dtype=torch.float64) for _ in range(2)]
        self.weight = self._normal(layer.channels, layer.conv_width).to(device)
        heads = layer.value_heads
        self.fixed = {
            "A_log": torch.linspace(-2, 1, heads).to(device),
            "dt_bias": torch.full((heads,), -2.0).to(device),
        }
        shapes = {
            "x": (layer.channels,), "q": (layer.key_heads, layer.dk), "k": (layer.key_heads, layer.dk),
            "v": (heads, layer.dv), "a": (heads,), "b": (heads,),
        }  # fmt: skip
        self.buckets = [Bucket(self.manager, c, layer, shapes) for c in capacities]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def run(self, which: int = 0) -> None:
        """The calls of a round, the rebuild of the trees included."""
        made = self.buckets[which]
        made.tree.update_(made.parents, made.offsets)
        for n, given in enumerate(made.inputs):
            made.round.conv(n, given["x"], self.weight)
            gates = {"a": given["a"], "b": given["b"], **self.fixed}
            made.round.verify(n, given["q"], given["k"], given["v"], gates=gates, out=made.outs[n])
        made.round.commit(made.accepted)

    def replay(self, which: int = 0) -> None:
        """Run a round as it stands: on a GPU from its graph, which the first call captures after it has run."""
        made = self.buckets[which]
        if self.device.type != "cuda":
            self.run(which)
        elif made.graph is None:
            self.run(which)  # compiles, and builds the descriptor tables
            first = next((b.graph for b in self.buckets if b.graph is not None), None)
            made.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(made.graph, pool=None if first is None else first.pool()):
                self.run(which)
        else:
            made.graph.replay()

    def _parents(self, nodes: int, depth: int) -> list[int]:
        """Draw a tree that is a chain, a star or anything, no deeper than a capacity."""
        parents = {
            "chain": lambda: list(range(-1, nodes - 1)),
            "star": lambda: [-1] + [0] * (nodes - 1),
            "random": lambda: random_parents(self.rng, nodes, padding=0.1),
        }[self.rng.choice(["chain", "star", "random", "random"])]()
        depths: list[int] = []
        for i, parent in enumerate(parents):
            at = depths[parent] + 1 if parent >= 0 else 0
            if at > depth:
                parents[i], at = -1, 0
            depths.append(at)
        return parents

    def draw(self, which: int = 0) -> None:
        """Draw who is served and how, and the inputs."""
        made, rng = self.buckets[which], self.rng
        c = made.capacity
        sizes = [rng.randint(1, c.max_nodes) for _ in range(c.max_batch)]
        while sum(sizes) > c.max_total:
            sizes[rng.randrange(c.max_batch)] = 1
        rows = [self._parents(n, c.max_depth) for n in sizes]
        flat = [p for row in rows for p in row]
        made.parents.copy_(torch.tensor(flat + [-2] * (c.max_total - len(flat))))
        made.offsets.copy_(torch.tensor([sum(sizes[:i]) for i in range(c.max_batch + 1)]))
        slots = rng.sample(range(SLOTS), c.max_batch)
        if c.max_batch > 1:
            slots[rng.randrange(c.max_batch)] = -1
        made.slots.copy_(torch.tensor(slots))
        live = [[i for i, p in enumerate(row) if p != -2] for row in rows]
        made.accepted.copy_(torch.tensor([rng.choice([-1, *nodes, *nodes]) for nodes in live]))
        for given in made.inputs:
            for t in given.values():
                t.copy_(self._normal(*t.shape))

    def play(self, which: int = 0) -> None:
        """Draw a round, run or replay it, and compare with the float64 recurrence."""
        self.draw(which)
        convs = [c.clone() for c in self.manager.request.conv_pools if c is not None]
        self.replay(which)
        self._check(self.buckets[which], convs)

    def _check(self, made: Bucket, convs: list[torch.Tensor]) -> None:
        tree = TreeBatch.from_packed(made.parents.cpu(), made.offsets.cpu(), made.capacity.max_nodes)
        slots, accepted = made.slots.cpu(), made.accepted.cpu()
        rows, live = tree.rows()
        kept = rows[live & (slots >= 0).unsqueeze(1)]
        spec = self.layer.spec
        written = [(b, int(s), int(a)) for b, (s, a) in enumerate(zip(slots, accepted, strict=True)) if s >= 0 <= a]
        for n, given in enumerate(made.inputs):
            q, k, v, a, b = (given[name].cpu() for name in ("q", "k", "v", "a", "b"))
            gates = {"a": a, "b": b, **{name: t.cpu() for name, t in self.fixed.items()}}
            exact = verify_sequential(q, k, v, gates=gates, state=self.states[n], slots=slots, tree=tree)
            assert_close(f"output {n}", made.outs[n].cpu()[kept], exact[kept], self.bounds[0])
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
