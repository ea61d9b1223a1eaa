"""Memory as vLLM lays it out, and its speculative step on it, one token after the other in float64.

Written apart from the adapter: addresses are counted in bytes from the start of one buffer.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from bole_runtime import LayerGeometry


@dataclass
class Sizes:
    """A small model of one group of recurrent layers. HV, dv and dk are heads, head size and state size of Mamba2."""

    family: str = "gdn"
    layers: int = 2
    hk: int = 2
    hv: int = 4
    dk: int = 8
    dv: int = 8
    width: int = 4
    drafts: int = 3
    order: str = "SD"
    state_dtype: torch.dtype = torch.float32
    conv_dtype: torch.dtype = torch.float32

    @property
    def channels(self) -> int:
        return 2 * self.hk * self.dk + self.hv * self.dv

    @property
    def geometry(self) -> LayerGeometry:
        return LayerGeometry(self.hk, self.hv, self.dk, self.dv, self.family, "raw", conv_width=self.width)


@dataclass
class Memory:
    """One allocation: block b of layer l starts at ``l * layer_stride + b * block_stride`` bytes."""

    sizes: Sizes
    blocks: int
    layers_outside: bool = True
    padding: int = 64
    raw: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        s = self.sizes
        self.conv_bytes = s.channels * (s.width - 1 + s.drafts) * s.conv_dtype.itemsize
        self.page = self.conv_bytes + s.hv * s.dv * s.dk * s.state_dtype.itemsize + self.padding
        outside = self.page * self.blocks, self.page
        self.layer_stride, self.block_stride = outside if self.layers_outside else (self.page, self.page * s.layers)
        self.raw = torch.zeros(self.page * self.blocks * s.layers, dtype=torch.int8)

    def fill(self) -> None:
        """Write random numbers everywhere, the null block and padding included."""
        s = self.sizes
        self.raw.random_(-128, 128)
        for layer in range(s.layers):
            for block in range(self.blocks):
                self.conv(layer, block).copy_(torch.randn(s.channels, s.width - 1 + s.drafts))
                self.state(layer, block).copy_(torch.randn(s.hv, s.dv, s.dk))

    def copy(self) -> Memory:
        other = Memory(self.sizes, self.blocks, self.layers_outside, self.padding)
        other.raw.copy_(self.raw)
        return other

    def pages(self, layer: int) -> torch.Tensor:
        """The raw pages of a layer as vLLM hands them to it, [blocks, 1, 1, bytes]."""
        shape, strides = (self.blocks, 1, 1, self.page), (self.block_stride, self.page, self.page, 1)
        return self.raw.as_strided(shape, strides, layer * self.layer_stride)

    def conv(self, layer: int, block: int) -> torch.Tensor:
        """[C, columns] of one block."""
        s = self.sizes
        at = layer * self.layer_stride + block * self.block_stride
        flat = self.raw[at : at + self.conv_bytes].view(s.conv_dtype)
        return flat.view(-1, s.channels).T if s.order == "SD" else flat.view(s.channels, -1)

    def state(self, layer: int, block: int) -> torch.Tensor:
        """[HV, dv, dk] of one block."""
        s = self.sizes
        at = layer * self.layer_stride + block * self.block_stride + self.conv_bytes
        size = s.hv * s.dv * s.dk * s.state_dtype.itemsize
        return self.raw[at : at + size].view(s.state_dtype).view(s.hv, s.dv, s.dk)


def weights(s: Sizes) -> dict[str, torch.Tensor]:
    """Parameters of one layer."""
    made = {"conv": torch.randn(s.channels, s.width) / 2, "A_log": torch.randn(s.hv), "dt_bias": torch.randn(s.hv)}
    return {**made, "D": torch.randn(s.hv)} if s.family == "mamba2" else made


def token_inputs(s: Sizes, tokens: int) -> dict[str, torch.Tensor]:
    """Inputs of one layer: x before the convolution, and the gates of the family."""
    made = {"x": torch.randn(tokens, s.channels)}
    for name in ("a", "b") if s.family == "gdn" else ("dt_raw",):
        made[name] = torch.randn(tokens, s.hv)
    return made


def split_heads(s: Sizes, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v of convolved channels: [q, k, v], or Mamba2's [x, B, C]."""
    key, value = s.hk * s.dk, s.hv * s.dv
    if s.family == "gdn":
        q, k, v = mixed.split((key, key, value), dim=-1)
    else:
        v, k, q = mixed.split((value, key, key), dim=-1)
    return q.unflatten(-1, (s.hk, s.dk)), k.unflatten(-1, (s.hk, s.dk)), v.unflatten(-1, (s.hv, s.dv))


def one_token(
    s: Sizes, w: dict[str, torch.Tensor], window: torch.Tensor, state: torch.Tensor, given: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Advance one layer by one token in float64: window [C, W - 1], state [HV, dv, dk]; returns output first."""
    p = {name: t.double() for name, t in (w | given).items()}
    seen = torch.cat([window.double(), p["x"][:, None]], 1)
    q, k, v = split_heads(s, F.silu((seen * p["conv"]).sum(1)))
    q, k = (t.repeat_interleave(s.hv // s.hk, 0) for t in (q, k))
    rate = -p["A_log"].exp()
    if s.family == "gdn":
        q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
        state = state * (rate * F.softplus(p["a"] + p["dt_bias"])).exp()[:, None, None]
        error = p["b"].sigmoid()[:, None] * (v - (state * k[:, None]).sum(2))
        state = state + error[:, :, None] * k[:, None]
        return (state * q[:, None]).sum(2) / math.sqrt(s.dk), seen[:, 1:], state
    dt = F.softplus(p["dt_raw"] + p["dt_bias"])
    state = state * (rate * dt).exp()[:, None, None] + (dt[:, None] * v)[:, :, None] * k[:, None]
    return (state * q[:, None]).sum(2) + p["D"][:, None] * v, seen[:, 1:], state


def vllm_step(
    memory: Memory, layer: int, w: dict[str, torch.Tensor], given: dict[str, torch.Tensor], table: torch.Tensor,
    accepted: torch.Tensor, starts: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """One step of vLLM's speculative path: the state after token i to column i, windows shifted by what was accepted.

    ``accepted`` counts the tokens of the step before. Returns outputs [tokens, HV, dv] in float64.
    """
    s = memory.sizes
    out = torch.zeros(given["x"].shape[0], s.hv, s.dv, dtype=torch.float64)
    for r, blocks in enumerate(table.tolist()):
        begin, end = int(starts[r]), int(starts[r + 1])
        if blocks[0] <= 0 or begin == end:
            continue
        first = int(accepted[r]) - 1
        state = memory.state(layer, blocks[first]).double()
        columns = memory.conv(layer, blocks[0])
        window = columns[:, first : first + s.width - 1].double()
        history = window[:, 1:]
        for t in range(begin, end):
            token = {name: v[t] for name, v in given.items()}
            out[t], window, state = one_token(s, w, window, state, token)
            memory.state(layer, blocks[t - begin]).copy_(state)
        after = torch.cat([history, given["x"][begin:end].double().T], 1)
        columns[:, : after.shape[1]] = after.to(columns.dtype)
    return out


def random_step(rng: random.Random, sizes: Sizes, rows: int, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``query_start_loc`` of rows of 1 to N + 1 tokens and padding rows behind, and what each row accepts."""
    lengths = [rng.randint(1, sizes.drafts + 1) for _ in range(rows)]
    lengths[0] = sizes.drafts + 1
    starts = torch.tensor([0, *lengths, *[0] * padding]).cumsum(0).int()
    took = [rng.randint(1, n) for n in lengths]
    return starts, torch.tensor([*took, *[1] * padding], dtype=torch.int32)


def block_table(rng: random.Random, sizes: Sizes, blocks: int, rows: int, padding: int) -> torch.Tensor:
    """Return blocks [rows + padding, N + 1] that occur once; 0, the null block, in padding rows."""
    width = sizes.drafts + 1
    table = torch.zeros(rows + padding, width, dtype=torch.int32)
    table[:rows] = torch.tensor(rng.sample(range(1, blocks), rows * width), dtype=torch.int32).view(rows, width)
    return table
