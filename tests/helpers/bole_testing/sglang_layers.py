"""Layers of SGLang in every family that its plug-in serves, called as SGLang calls them, and rounds of them checked."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import silu, softplus

from bole_runtime.integrations.sglang import gdn, kda, mamba2, rounds
from bole_testing.close import assert_close, assert_same_bits
from bole_testing.sglang import CHAIN, LAYER_IDS, NODES, TREE, Step, delta_step, make_backend, make_batch, refuse, walk

LAYERS, SLOTS, W = len(LAYER_IDS), 6, 4


class Family:
    """A layer of SGLang in one family; ``forward`` calls the hook."""

    hook: Callable[..., Any]
    states: tuple[int, int, int]
    channels: int
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def draw(self, rows: int) -> torch.Tensor:
        """Draw the inputs of a round; return the convolution's, [rows, nodes, C]."""
        raise NotImplementedError

    def step(self) -> Step:
        raise NotImplementedError

    def forward(self, backend: Any, layer_id: int, batch: Any) -> torch.Tensor:
        """Return [rows, nodes, ...]."""
        raise NotImplementedError

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        return out

    def windows(self, pool: torch.Tensor) -> torch.Tensor:
        """[layers, slots, C, W - 1] of the engine's pool."""
        return pool


class Delta(Family):
    """A ``RadixLinearAttention``: Gated DeltaNet, or KDA with as many key heads as value heads."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        keys, heads, dk, dv = (2, 2, 8, 8) if kind != "gdn" else (1, 2, 8, 8)
        self.states, self.channels = (heads, dv, dk), 2 * keys * dk + heads * dv
        self.weight = torch.randn(self.channels, W)
        self.bias = torch.randn(self.channels) if kind == "gdn" else None
        self.A_log, self.dt_bias = torch.randn(heads), torch.randn(heads * (1 if kind == "gdn" else dk))
        self.bound = -5.0 if kind == "kda bounded" else None
        self.layer = SimpleNamespace(
            conv_weights=self.weight, bias=self.bias, activation="silu", q_dim=keys * dk, k_dim=keys * dk,
            v_dim=heads * dv, num_q_heads=keys, num_k_heads=keys, num_v_heads=heads, head_q_dim=dk, head_k_dim=dk,
            head_v_dim=dv, A_log=self.A_log if kind == "gdn" else self.A_log.view(1, 1, -1, 1), dt_bias=self.dt_bias,
        )  # fmt: skip
        if kind not in ("gdn", "kda ready"):
            self.layer.lower_bound = self.bound
        self.hook = gdn.forward_extend if kind == "gdn" else kda.forward_extend

    def draw(self, rows: int) -> torch.Tensor:
        heads, _, dk = self.states
        self.mixed = torch.randn(rows * NODES, self.channels + 3)[:, : self.channels]  # columns of a wider projection
        self.b = torch.randn(rows * NODES, 2 * heads)[:, heads:]
        self.b[0] *= 40  # sigmoids of 0 and 1
        self.a = torch.randn(rows * NODES, heads * (1 if self.kind == "gdn" else dk))
        return self.mixed.unflatten(0, (rows, NODES))

    def step(self) -> Step:
        heads, dv, dk = self.states
        rows = self.a.shape[0] // NODES
        a, b = self.a.double().view(rows, NODES, heads, -1), self.b.double().reshape(rows, NODES, heads)
        x = a + self.dt_bias.double().view(heads, -1)
        rate = self.A_log.double().exp()[:, None]
        g = -rate * softplus(x, threshold=20) if self.bound is None else self.bound * torch.sigmoid(rate * x)

        def one(state: torch.Tensor, mixed: torch.Tensor, row: int, node: int) -> tuple[torch.Tensor, torch.Tensor]:
            q, k, v = mixed.split((self.layer.q_dim, self.layer.k_dim, self.layer.v_dim))
            parts = q.view(-1, dk), k.view(-1, dk), v.view(-1, dv)
            return delta_step(state, *parts, g[row, node], torch.sigmoid(b[row, node]))

        return one

    def forward(self, backend: Any, layer_id: int, batch: Any) -> torch.Tensor:
        self.layer.layer_id = layer_id
        a, b = self.a, self.b
        if self.kind == "kda ready":  # 0.5.16: KimiDeltaAttention.forward in every mode but decoding
            a, b = a.unflatten(-1, (-1, self.states[2])).unsqueeze(0), b.float().sigmoid().unsqueeze(0)
        elif self.kind != "gdn":  # 0.5.23
            b = b.unsqueeze(0)
        out = self.hook(
            refuse, backend, layer=self.layer, forward_batch=batch, mixed_qkv=self.mixed, a=a, b=b, q=None,
            save_kv_cache=True,
        )  # fmt: skip
        assert out.shape == (1, self.mixed.shape[0], *self.states[:2])
        return out[0].unflatten(0, (-1, NODES))

    def windows(self, pool: torch.Tensor) -> torch.Tensor:
        return pool if self.kind == "gdn" else pool.transpose(-1, -2)


class Mixer(Family):
    """A ``MambaMixer2`` of one of ``share`` ranks, with its projections and its norm."""

    hidden = 6

    def __init__(self, share: int, mup: bool) -> None:
        heads, groups, dv, dk = 4, 2, 8, 16
        self.heads, self.groups, self.inner, self.share = heads, groups, heads * dv, share
        self.states, self.channels = (heads, dv, dk), heads * dv + 2 * groups * dk
        columns = self.inner + self.channels + heads
        self.into, self.out = torch.randn(columns, self.hidden), torch.randn(self.hidden, self.inner)
        self.mup = torch.rand(columns) if mup else None
        self.weight, self.bias = torch.randn(self.channels, W), torch.randn(self.channels)
        self.rate = -torch.rand(heads) - 0.1
        self.D, self.dt_bias = torch.randn(heads), torch.randn(heads)
        self.mixer = SimpleNamespace(
            tp_size=share, intermediate_size=self.inner * share, conv_dim=self.channels * share,
            num_heads=heads * share, n_groups=groups * share, ssm_state_size=dk, head_dim=dv, activation="silu",
            conv1d=SimpleNamespace(weight=self.weight.unsqueeze(1), bias=self.bias), A=self.rate, D=self.D,
            dt_bias=self.dt_bias, in_proj=lambda h: (h @ self.into.T, None), norm=self.norm,
            out_proj=lambda x: (x @ self.out.T, None),
        )  # fmt: skip
        self.hook = mamba2.forward

    def norm(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        x = (x * silu(gate)).unflatten(-1, (self.groups, -1))
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)).flatten(-2)

    def draw(self, rows: int) -> torch.Tensor:
        self.x = torch.randn(rows, NODES, self.hidden)
        projected = self.x @ self.into.T * (1 if self.mup is None else self.mup)
        self.gate, raw, self.dt = projected.split((self.inner, self.channels, self.heads), -1)
        return raw

    def step(self) -> Step:
        heads, dv, dk = self.states
        steps = softplus(self.dt.double() + self.dt_bias.double(), threshold=20)

        def one(state: torch.Tensor, mixed: torch.Tensor, row: int, node: int) -> tuple[torch.Tensor, torch.Tensor]:
            # _selective_scan_update_kernel (kernels/ops/mamba/triton_ops/mamba_ssm.py), z is None.
            x, b, c = mixed.split((self.inner, self.groups * dk, self.groups * dk))
            x, b, c = x.view(heads, dv), b.view(-1, dk), c.view(-1, dk)
            new, outs = state.clone(), []
            for h in range(heads):
                dt, group = steps[row, node, h], h // (heads // self.groups)
                new[h] = state[h] * (self.rate[h].double() * dt).exp() + dt * torch.outer(x[h], b[group])
                outs.append(new[h] @ c[group] + self.D[h].double() * x[h])
            return new, torch.stack(outs)

        return one

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        return self.norm(out.flatten(-2), self.gate.double()) @ self.out.T.double()

    def forward(self, backend: Any, layer_id: int, batch: Any) -> torch.Tensor:
        x = self.x.flatten(0, 1)
        if self.share > 1:  # as Nemotron-H and Granite call it; tokens that only fill the batch up
            x = torch.cat([x, torch.ones(2, self.hidden)])
        written = torch.full_like(x, 7.0)
        if self.mup is not None:  # as Falcon-H1 calls it
            out = self.hook(
                refuse, backend, self.mixer, x, written, layer_id=layer_id, forward_batch=batch, mup_vector=self.mup
            )
        else:
            out = self.hook(
                refuse, backend, mixer=self.mixer, layer_id=layer_id, hidden_states=x, output=written,
                forward_batch=batch, use_triton_causal_conv=True,
            )  # fmt: skip
        assert_same_bits("output", written, out)
        return out[: self.x.shape[0] * NODES].unflatten(0, (-1, NODES))


def make(kind: str) -> Family:
    return Mixer(2 if kind == "mamba2 sharded" else 1, kind == "mamba2 mup") if "mamba2" in kind else Delta(kind)


KINDS = ["gdn", "kda", "kda bounded", "kda ready", "mamba2", "mamba2 mup", "mamba2 sharded"]


def check_rounds(kind: str, shape: str, track: bool) -> None:
    """Run rounds of several batch sizes: outputs, committed and tracked states against loops over SGLang's semantics.

    ``kda.write_gate_is_ready`` must already say what the kind needs.
    """
    torch.manual_seed(1)
    layers = [make(kind) for _ in LAYER_IDS]
    one = layers[0]
    inside = (one.channels, W - 1) if not kind.startswith("kda") else (W - 1, one.channels)
    backend = make_backend(torch.randn(LAYERS, SLOTS, *one.states), torch.randn(LAYERS, SLOTS, *inside))
    cache = backend.req_to_token_pool.mamba_pool.mamba_cache
    states, pools = cache.temporal, one.windows(cache.conv[0])
    for turn in range(4):
        slots = ([4, 2], [4, -1], [1, 4, 2], [4, 2])[turn]  # a graph's padding row; more rows than were known of
        live = [b for b, slot in enumerate(slots) if slot >= 0]
        batch = make_batch(backend, torch.tensor(slots, dtype=torch.int32), shape)
        accepted, steps, targets = [3, 0, 4][: len(live)], [1, -1, 2][: len(live)], [0, 5, 3][: len(live)]
        if turn == 2:  # weights replaced in place
            for layer in layers:
                (layer.rate if isinstance(layer, Mixer) else layer.A_log).mul_(0.5)
        want = []
        for n, (layer_id, layer) in enumerate(zip(LAYER_IDS, layers, strict=True)):
            raw = layer.draw(len(slots))
            parents = TREE if shape == "tree" else CHAIN
            out, after, kept = walk(
                states[n], pools[n], raw, parents, slots, layer.weight, layer.bias, layer.step()
            )  # fmt: skip
            got = layer.forward(backend, layer_id, batch)
            assert_close(f"turn {turn} output", got, layer.finish(out), 5e-6)
            new, window = states[n].clone(), pools[n].clone()
            for b in live:
                new[slots[b]], window[slots[b]] = after[b][accepted[b]].float(), kept[b][accepted[b]].float()
                if track and steps[b] >= 0:
                    new[targets[b]], window[targets[b]] = after[b][steps[b]].float(), kept[b][steps[b]].float()
            want.append((new, window))
        rounds.commit(
            refuse, SimpleNamespace(linear_attn_backend=backend), last_correct_step_indices=torch.tensor(accepted),
            mamba_track_indices=torch.tensor(targets) if track else None,
            mamba_steps_to_track=torch.tensor(steps) if track else None, model=None, req_pool_indices=None,
        )  # fmt: skip
        for n, (new, window) in enumerate(want):
            assert_close(f"turn {turn} states", states[n], new.double(), 2e-6)
            assert_same_bits(f"turn {turn} windows", pools[n], window)
