"""An engine in miniature: random rounds through a StateManager, beside the float64 recurrence of every request."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bole_runtime import Factors, LayerGeometry, Snapshot, StateManager, TreeBatch
from bole_runtime.reference import commit_sequential, flush_sequential, verify_sequential
from bole_runtime.sampling import accept
from bole_runtime.state.round import Round
from bole_testing.cases.base import random_parents
from bole_testing.close import assert_close, assert_same_bits
from bole_testing.oracle import Oracle

#: Two layers of one geometry with a convolution in front, and one of another without.
LAYERS = (
    LayerGeometry(1, 2, 8, 8, conv_width=4),
    LayerGeometry(2, 2, 16, 8),
    LayerGeometry(1, 2, 8, 8, conv_width=4),
)

Gates = Callable[[LayerGeometry, Callable[..., torch.Tensor], Sequence[int]], Mapping[str, torch.Tensor]]


def gdn_gates(
    layer: LayerGeometry, normal: Callable[..., torch.Tensor], lead: Sequence[int]
) -> Mapping[str, torch.Tensor]:
    """Ready gates of a trained model's range."""
    return {"g": -normal(*lead, layer.value_heads).abs(), "beta": normal(*lead, layer.value_heads).sigmoid()}


class Server:
    """Drives a manager and the oracle through the same random operations, and compares after each.

    Args:
        seed: of everything drawn.
        layers: geometry.
        gates: draws the gates of a layer.
        state_bound: relative error allowed for a state after any number of rounds.
        output_bound: relative error allowed for an output; None: outputs are not compared.
        parameters: per-head gate inputs, the same for every layer.
        device: of the manager; the oracle stays on the CPU.
        **sizes: of the manager.
    """

    def __init__(
        self,
        seed: int,
        *,
        layers: Sequence[LayerGeometry] = LAYERS,
        gates: Gates = gdn_gates,
        state_bound: float = 2e-6,
        output_bound: float | None = 1e-5,
        parameters: Mapping[str, torch.Tensor] | None = None,
        device: str = "cpu",
        **sizes: Any,
    ) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        given = {"slots": 6, "max_batch": 4, "max_nodes": 7, "max_total": 24, "dtype": torch.float32, **sizes}
        self.device = torch.device(device)
        self.manager = StateManager(list(layers), device=device, **given)
        self.oracle = Oracle(self.manager)
        self.gates, self.parameters = gates, parameters or {}
        self.state_bound, self.output_bound = state_bound, output_bound
        self.snapshots: list[tuple[Snapshot, list[torch.Tensor]]] = []
        self.rounds = self._make_rounds()
        self.weights = {n: self.normal(y.channels, y.conv_width) for n, y in enumerate(layers) if y.conv_width}
        self.accepted_tokens = 0
        self.longest_walk = 0
        self.done: dict[str, int] = {}

    def _make_rounds(self) -> list[Round]:
        config = self.manager.config
        trees = [
            TreeBatch(config.max_batch, config.max_nodes, max_total=config.max_total, device=self.device),
            TreeBatch(min(2, config.max_batch), min(5, config.max_nodes), device=self.device),
            TreeBatch(
                1, config.max_nodes, max_total=min(config.max_nodes + 2, config.max_total), device=self.device
            ),
        ]  # fmt: skip
        slots = [torch.full((t.max_batch,), -1, dtype=torch.int32, device=self.device) for t in trees]
        return [self.manager.round(t, s) for t, s in zip(trees, slots, strict=True)]

    def normal(self, *shape: int) -> torch.Tensor:
        """Draw fp32 numbers."""
        return torch.randn(*shape, generator=self.generator)

    # Operations

    def allocate(self) -> None:
        if self.manager.free_slots:
            self.oracle.reset(self.manager.allocate())

    def free(self) -> None:
        self.manager.free(self.slot())

    def fork(self) -> None:
        if self.manager.free_slots:
            source = self.slot()
            self.oracle.copy(self.manager.fork(source), source)

    def copy(self) -> None:
        target, source = self.slot(), self.slot()
        self.manager.copy(target, source)
        self.oracle.copy(target, source)

    def snapshot(self) -> None:
        slot = self.slot()
        whole = self.rng.random() < 0.5
        before = [p[slot].clone() for p in self.manager.request.pools]
        self.snapshots.append((self.manager.snapshot(slot, materialise=not whole), self.oracle.save(slot)))
        if whole:
            for n, (pool, bits) in enumerate(zip(self.manager.request.pools, before, strict=True)):
                assert_same_bits(f"layer {n} after a snapshot with its chain", pool[slot], bits)
        del self.snapshots[:-3]

    def restore(self) -> None:
        if self.snapshots:
            slot, (snapshot, saved) = self.slot(), self.rng.choice(self.snapshots)
            self.manager.restore(slot, snapshot)
            self.oracle.load(slot, saved)

    def materialise(self) -> None:
        self.manager.materialise(None if self.rng.random() < 0.3 else [self.slot()])

    def exchange(self) -> None:
        source, target = self.slot(), self.slot()
        layout = self.rng.choice(["dk_dv", "dv_dk"])
        self.manager.import_states(target, *self.manager.export_states(source, layout, conv=True), layout=layout)
        self.oracle.copy(target, source)

    def abandon(self) -> None:
        made = self.rng.choice(self.rounds)
        self._fill(made)
        layers = range(len(self.manager.config.layers))
        for n in self.rng.sample(layers, self.rng.randrange(len(layers) + 1)):
            self._verify(made, n)
        made.abandon()

    def round(self) -> None:
        made = self.rng.choice(self.rounds)
        self._fill(made)
        layers = list(range(len(self.manager.config.layers)))
        self.rng.shuffle(layers)
        factors, inputs = {}, {}
        for n in layers:
            inputs[n] = self._convolve(made, n)
            factors[n] = self._verify(made, n)
        accepted = self._walk(made) if self.rng.random() < 0.5 else self._choose(made)
        made.commit(accepted)
        self._advance(made, factors, inputs, accepted.cpu())

    # What a round is made of

    def slot(self) -> int:
        return self.rng.choice(sorted(self.manager.used_slots))

    def _fill(self, made: Round) -> None:
        """Draw trees and requests of a round, in place."""
        tree, rng = made.tree, self.rng
        sizes = [rng.randint(1, tree.max_nodes) for _ in range(tree.max_batch)]
        while tree.is_packed and sum(sizes) > tree.max_total:
            sizes[rng.randrange(len(sizes))] = 1
        rows = [random_parents(rng, n, padding=0.1) for n in sizes]
        if tree.is_packed:
            flat = [p for row in rows for p in row]
            ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
            flat += [-2] * (tree.max_total - len(flat))
            tree.update_(self._there(torch.tensor(flat)), self._there(torch.tensor(ends)))
        else:
            tree.update_(self._there(torch.tensor([row + [-2] * (tree.max_nodes - len(row)) for row in rows])))
        used = sorted(self.manager.used_slots)
        chosen = rng.sample(used, min(len(used), rng.randint(1, tree.max_batch)))
        chosen += [-1] * (tree.max_batch - len(chosen))
        rng.shuffle(chosen)
        made.slots.copy_(torch.tensor(chosen))

    def _choose(self, made: Round) -> torch.Tensor:
        """Draw terminal nodes: any, among them some that an acceptance seldom gets to, and none."""
        live = self._tree(made).rows()[1].tolist()
        choices = [[-1, *(i for i, on in enumerate(row) if on)] for row in live]
        kind = self.rng.choice([torch.int32, torch.int64])
        return self._there(torch.tensor([self.rng.choice(c) for c in choices], dtype=kind))

    def _walk(self, made: Round) -> torch.Tensor:
        """Return the terminal nodes of an acceptance of random tokens, few of them, so that paths are long."""
        tree = self._tree(made)
        logits, tokens = self.normal(*tree.lead, 3), torch.randint(3, tree.lead, generator=self.generator)
        logits[self._dead(made)] = float("nan")
        options: dict[str, Any] = {}
        if self.rng.random() < 0.5:
            seeds, positions = torch.randint(1 << 40, (2, tree.max_batch), generator=self.generator)
            options = {"method": "sample", "seeds": self._there(seeds), "positions": self._there(positions % 1000)}
        got = accept(self._there(logits), self._there(tokens), made.tree, **options)
        served = made.slots.cpu() >= 0
        assert not got.status.cpu()[served].any()
        for path, node, b in zip(got.path.tolist(), got.accepted.tolist(), range(tree.max_batch), strict=True):
            assert [i for i in path if i >= 0] == (tree.path(b, node) if node >= 0 else [])
        self.longest_walk = max([self.longest_walk, *got.lengths.cpu()[served].tolist()])
        return got.accepted

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def _tree(self, made: Round) -> TreeBatch:
        """The tree of a round on the CPU, where the oracle is."""
        tree = made.tree
        if self.device.type == "cpu":
            return tree
        if tree.offsets is None:
            return TreeBatch.from_parents(tree.parents.cpu())
        return TreeBatch.from_packed(tree.parents.cpu(), tree.offsets.cpu(), tree.max_nodes)

    def _dead(self, made: Round) -> torch.Tensor:
        """Rows that nothing may depend on."""
        rows, live = self._tree(made).rows()
        dead = torch.ones(made.tree.max_total, dtype=torch.bool)
        dead[rows[live & (made.slots.cpu() >= 0).unsqueeze(1)]] = False
        return dead.reshape(made.tree.lead)

    def _convolve(self, made: Round, n: int) -> torch.Tensor | None:
        if n not in self.weights:
            return None
        x = self.normal(*made.tree.lead, self.manager.config.layers[n].channels)
        x[self._dead(made)] = float("nan")
        made.conv(n, self._there(x), self._there(self.weights[n]))
        return x

    def _verify(self, made: Round, n: int) -> Factors:
        layer, lead = self.manager.config.layers[n], made.tree.lead
        q, k = (self.normal(*lead, layer.key_heads, layer.dk) for _ in range(2))
        v = self.normal(*lead, layer.value_heads, layer.dv)
        gates = {**self.gates(layer, self.normal, lead), **self.parameters}
        dead = self._dead(made)
        for t in (q, k, v, *(t for name, t in gates.items() if name not in self.parameters)):
            t[dead] = float("nan")
        there = {name: self._there(t) for name, t in gates.items()}
        out = made.verify(n, *(self._there(t) for t in (q, k, v)), gates=there).cpu()
        tree = self._tree(made)
        if self.output_bound is not None:
            exact = verify_sequential(
                q, k, v, gates=gates, state=self.oracle.states[n], slots=made.slots.cpu(), tree=tree,
                recurrence=layer.spec,
            )  # fmt: skip
            # The output of few nodes can cancel (a key at right angles to a query): rounding then is that of its terms.
            usual = float(v[~dead].double().norm()) * layer.dk**-0.5
            least = max(float(exact[~dead].norm()), 0.01 * usual)
            bound = self.output_bound * least / max(float(exact[~dead].norm()), 1e-30)
            assert_close(f"output of layer {n}", out[~dead], exact[~dead], bound)
        mode = next(m for m in layer.spec.modes if layer.spec.required[m] <= gates.keys())
        floats = {i.name: i.default for i in layer.spec.options(mode)}
        scale = floats.pop("beta_scale", 1.0)
        return Factors(
            layer.spec, mode, k, v, dict(gates), scale, layer.spec.qk_l2norm, tree, options=floats
        )  # fmt: skip

    def _advance(
        self,
        made: Round,
        factors: Mapping[int, Factors],
        inputs: Mapping[int, torch.Tensor | None],
        accepted: torch.Tensor,
    ) -> None:
        tree, slots = self._tree(made), made.slots.cpu()
        rows = [(b, int(s), int(a)) for b, (s, a) in enumerate(zip(slots, accepted, strict=True)) if s >= 0 <= a]
        for n, part in factors.items():
            new = commit_sequential(self.oracle.states[n], slots, part, accepted)
            x, conv = inputs[n], self.oracle.convs[n]
            for b, slot, node in rows:
                self.oracle.states[n][slot] = new[b]
                if x is None or conv is None:
                    continue
                path = tree.path(b, node)
                first = int(tree.offsets[b]) if tree.offsets is not None else 0
                tokens = x[[first + i for i in path]] if tree.is_packed else x[b, path]
                conv[slot] = torch.cat((conv[slot], tokens.double().T), 1)[:, -conv.shape[2] :]
        self.accepted_tokens += sum(len(tree.path(b, node)) for b, _, node in rows)

    # Checks

    def check(self) -> None:
        """Compare every slot in use: what the state will be once its chain is folded in, and the convolutions."""
        used = sorted(self.manager.used_slots)
        if not used:
            return
        index, request = torch.tensor(used, device=self.device), self.manager.request
        for n, layer in enumerate(self.manager.config.layers):
            states = request.pools[n][index].double()
            mode = layer.spec.kept_mode(layer.gate_mode)
            if request.chains and request.contexts[n].serves(layer.spec, mode):
                chain, known = request.chains[n], request.contexts[n]
                states = flush_sequential(
                    request.pools[n], index, chain, recurrence=layer.spec, gates={**known.parameters, **known.floats}
                )
            assert_close(f"state of layer {n}", states.cpu(), self.oracle.states[n][used], self.state_bound)
            conv, exact = request.conv_pools[n], self.oracle.convs[n]
            if conv is not None and exact is not None:
                assert_close(f"convolution state of layer {n}", conv[index].cpu(), exact[used], 1e-12)

    def step(self) -> None:
        """Do one random operation and compare."""
        if not self.manager.used_slots:
            self.allocate()
        names = ["round"] * 12 + [
            "abandon",
            "abandon",
            "allocate",
            "allocate",
            "free",
            "fork",
            "copy",
            "snapshot",
            "restore",
        ]
        names += ["materialise", "exchange"]
        name = self.rng.choice(names)
        if name == "free" and len(self.manager.used_slots) < 2:
            name = "round"
        getattr(self, name)()
        self.done[name] = self.done.get(name, 0) + 1
        self.check()
