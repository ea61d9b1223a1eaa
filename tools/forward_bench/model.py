"""The model: geometry, random weights, caches, and a step over trees from tokens to logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from bole_codegen.presets import get_preset
from bole_runtime import LayerGeometry, StateManager, TreeBatch, accept
from bole_runtime.layers import GatedDeltaNet
from bole_runtime.sampling import Acceptance
from forward_bench.attention import TreeAttention

_EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """Sizes of a hybrid model. Every ``period``-th layer is attention, the others are Gated DeltaNet.

    Attributes:
        name: what is said of it in a table.
        layers: all layers.
        period: distance of attention layers.
        hidden: width of the residual stream.
        intermediate: width of the MLPs.
        vocabulary: rows of embedding and head, which are not tied.
        recurrent: geometry of the recurrent layers.
        heads: query heads.
        kv_heads: key heads.
        head_dim: of attention.
        rotary: dimensions of a head that are rotated.
    """

    name: str
    layers: int
    period: int
    hidden: int
    intermediate: int
    vocabulary: int
    recurrent: LayerGeometry
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int

    def attends(self, layer: int) -> bool:
        """Whether a layer is attention."""
        return layer % self.period == self.period - 1


def qwen() -> Shape:
    """Return Qwen3.5-9B's shape: the preset, and what it leaves out (Qwen3_5TextConfig of transformers 5.24)."""
    preset = get_preset("qwen3.5-9b")
    raw, attention = preset.raw, preset.raw["attn"]
    g = preset.shard(1)
    layer = LayerGeometry(g.hk, g.hv, g.dk, g.dv, gate_mode="raw", conv_width=raw["conv_width"])
    return Shape(
        preset.name, preset.layers, preset.layers // raw["attn_layers"], raw["hidden"], 12288, raw["vocab"], layer,
        attention["q"], attention["kv"], attention["d"], attention["d"] // 4,
    )  # fmt: skip


def tiny() -> Shape:
    """Return a model of the same parts for a CPU."""
    layer = LayerGeometry(1, 2, 16, 16, gate_mode="raw", conv_width=4)
    return Shape("tiny test model", 4, 4, 32, 48, 61, layer, 4, 2, 16, 8)


class Weights:
    """Random matrices of a model, made where they stay; every product keeps the variance of its input."""

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None = None
    ) -> None:
        def normal(*sizes: int, scale: float | None = None, dtype: torch.dtype = dtype) -> torch.Tensor:
            made = torch.empty(sizes, dtype=dtype, device=device)
            return made.normal_(0.0, sizes[-1] ** -0.5 if scale is None else scale, generator=generator)

        s, r, d = shape, shape.recurrent, shape.head_dim
        self.embedding, self.head = normal(s.vocabulary, s.hidden, scale=1.0), normal(s.vocabulary, s.hidden)
        self.layers: list[dict[str, torch.Tensor]] = []
        self.cores: list[GatedDeltaNet | None] = []
        for n in range(s.layers):
            made = {
                "gate_up": normal(2 * s.intermediate, s.hidden),
                "down": normal(s.hidden, s.intermediate),
                "norms": torch.ones(2, s.hidden, dtype=dtype, device=device),
            }
            core = None
            if s.attends(n):
                made["in"] = normal((2 * s.heads + 2 * s.kv_heads) * d, s.hidden)
                made["out"] = normal(s.hidden, s.heads * d)
                made["qk_norm"] = torch.ones(s.heads + s.kv_heads, d, dtype=dtype, device=device)
            else:
                core = GatedDeltaNet(
                    r.key_heads, r.value_heads, r.dk, r.dv, conv_weight=normal(r.channels, r.conv_width),
                    A_log=normal(r.value_heads, scale=0.5, dtype=torch.float32),
                    dt_bias=normal(r.value_heads, scale=0.5, dtype=torch.float32),
                    norm_weight=torch.ones(r.dv, dtype=dtype, device=device),
                )  # fmt: skip
                made["in"] = normal(core.channels + core.value_dim, s.hidden)
                made["gates"] = normal(2 * r.value_heads, s.hidden)
                made["out"] = normal(s.hidden, core.value_dim)
            self.layers.append(made)
            self.cores.append(core)


def topology(nodes: int, depth: int) -> list[int]:
    """Return the parents of a tree of that depth: a spine, whose nodes share the rest as further children in turn."""
    return [i - 1 if i <= depth else (i - depth - 1) % max(1, depth) for i in range(nodes)]


class Model:
    """Weights and recurrent states of a model, and its caches of keys and values."""

    def __init__(
        self, shape: Shape, *, max_batch: int, max_nodes: int, dtype: torch.dtype, device: torch.device,
        precision: str = "lossless", seed: int = 0,
    ) -> None:  # fmt: skip
        """Make everything but the caches.

        Args:
            shape: sizes.
            max_batch: most requests of a step.
            max_nodes: most nodes of a request.
            dtype: of weights, activations and caches; states are fp32.
            device: where everything lives.
            precision: profile of the recurrent layers.
            seed: of everything random.
        """
        self.shape, self.dtype, self.device, self.max_nodes = shape, dtype, device, max_nodes
        self.generator = torch.Generator(device).manual_seed(seed)
        self.weights = Weights(shape, dtype, device, self.generator)
        recurrent = sum(not shape.attends(n) for n in range(shape.layers))
        self.manager = StateManager(
            [shape.recurrent] * recurrent, slots=max_batch, max_batch=max_batch, max_nodes=max_nodes, dtype=dtype,
            precision=precision, device=device,
        )  # fmt: skip
        for _ in range(max_batch):
            self.manager.allocate()
        for pool in (*self.manager.request.pools, *self.manager.request.conv_pools):
            if pool is not None:
                pool.normal_(0.0, 0.2, generator=self.generator)
        self.caches = torch.empty(0)

    def cache(self, batch: int, kv: int) -> None:
        """Make keys and values of a context, and room for the nodes: [attention layers, 2, B, kv + N, HK, D]."""
        s = self.shape
        self.caches = torch.empty(0)  # the ones before go first
        layers = sum(s.attends(n) for n in range(s.layers))
        sizes = (layers, 2, batch, kv + self.max_nodes, s.kv_heads, s.head_dim)
        self.caches = torch.empty(sizes, dtype=self.dtype, device=self.device).normal_(generator=self.generator)


class Step:
    """One forward over trees of one size: a CUDA graph can hold it. Logits of every node.

    Attributes:
        tree: rebuilt from ``parents`` in every step, as an engine does.
        parents: int32 [B, N].
        tokens: int64 [B, N].
    """

    def __init__(self, model: Model, batch: int, nodes: int, kv: int, depth: int, *, method: str, whole: bool) -> None:
        """Prepare a step; the model's cache must be that of the batch and context.

        Args:
            model: with its caches.
            batch: requests.
            nodes: nodes a request.
            kv: context length.
            depth: of the trees.
            method: of attention.
            whole: accept (greedy) and commit as well.
        """
        device = model.device
        self._model, self._kv, self._method, self._whole = model, kv, method, whole
        parents = torch.tensor(topology(nodes, depth), dtype=torch.int32, device=device)
        self.parents = parents.expand(batch, -1).contiguous()
        self.tree = TreeBatch.from_parents(self.parents, max_depth=depth, validate=False)
        sizes = (batch, nodes)
        self.tokens = torch.randint(model.shape.vocabulary, sizes, device=device, generator=model.generator)
        self._round = model.manager.round(self.tree, torch.arange(batch, dtype=torch.int32, device=device))
        self._accepted = Acceptance.empty(self.tree)
        rates = 1e4 ** -torch.arange(0.0, 1.0, 2 / model.shape.rotary, device=device)
        angles = torch.arange(kv + model.max_nodes, device=device).unsqueeze(1) * rates
        self._angles = torch.stack((angles.cos(), angles.sin())).repeat(1, 1, 2).to(model.dtype)

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        """Run it; returns logits [B, N, V]."""
        model, shape, weights = self._model, self._model.shape, self._model.weights
        tree = self.tree.update_(self.parents)
        group = shape.heads // shape.kv_heads
        attend = TreeAttention(tree.mask(), group, self._kv, self._method, model.dtype)
        turn = self._angles[:, self._kv + tree.depths.long()].unsqueeze(3)
        x = F.embedding(self.tokens, weights.embedding)
        recurrent = attention = 0
        for w, core in zip(weights.layers, weights.cores, strict=True):
            mixed = F.rms_norm(x, (shape.hidden,), w["norms"][0], _EPS)
            if core is None:
                x = x + self._attention(attention, w, mixed, attend, turn)
                attention += 1
            else:
                x = x + self._recurrent(recurrent, w, core, mixed)
                recurrent += 1
            wide = F.linear(F.rms_norm(x, (shape.hidden,), w["norms"][1], _EPS), w["gate_up"])
            gate, up = wide.chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w["down"])
        logits = F.linear(F.rms_norm(x, (shape.hidden,), None, _EPS), weights.head)
        if self._whole:
            accept(logits, self.tokens, tree, out=self._accepted)
            self._round.commit(self._accepted.accepted, validate=False)
        else:
            self._round.abandon()
        return logits

    def _recurrent(self, n: int, w: dict[str, torch.Tensor], core: GatedDeltaNet, x: torch.Tensor) -> torch.Tensor:
        raw, z, b, a = core.split(F.linear(x, w["in"]), F.linear(x, w["gates"]))
        mixed = self._round.conv(n, raw, core.conv_weight, validate=False)
        q, k, v = mixed.split([core.key_dim, core.key_dim, core.value_dim], -1)
        out = self._round.verify(
            n, q.unflatten(-1, (-1, core.dk)), k.unflatten(-1, (-1, core.dk)), v.unflatten(-1, (-1, core.dv)),
            gates={"a": a, "b": b, "A_log": core.A_log, "dt_bias": core.dt_bias}, validate=False,
        )  # fmt: skip
        # Not core.norm, whose separate fp32 operations are for exactness: engines have one kernel here.
        normed = F.rms_norm(out, (core.dv,), core.norm_weight, _EPS) * F.silu(z)
        return F.linear(normed.flatten(-2), w["out"])

    def _attention(
        self, n: int, w: dict[str, torch.Tensor], x: torch.Tensor, attend: TreeAttention, turn: torch.Tensor
    ) -> torch.Tensor:
        s, kv = self._model.shape, self._kv
        batch, nodes = self.tokens.shape
        parts = F.linear(x, w["in"]).unflatten(-1, (-1, s.head_dim))
        qk, v, gate = parts.split([s.heads + s.kv_heads, s.kv_heads, s.heads], 2)
        qk = F.rms_norm(qk, (s.head_dim,), None, _EPS) * w["qk_norm"]
        first, second = qk[..., : s.rotary].chunk(2, -1)
        turned = qk[..., : s.rotary] * turn[0] + torch.cat((-second, first), -1) * turn[1]
        q, k = torch.cat((turned, qk[..., s.rotary :]), -1).split([s.heads, s.kv_heads], 2)
        keys, values = self._model.caches[n, :, :batch, : kv + nodes]
        keys[:, kv:], values[:, kv:] = k, v
        out = attend(q, keys, values) * torch.sigmoid(gate)
        return F.linear(out.flatten(2), w["out"])
