"""Random convolutions along trees against the float64 reference: what the torch, interpreter and GPU tests run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from bole_runtime import ConvFactors, ConvPending, TreeBatch, conv_commit, tree_conv
from bole_runtime.conv import prepare_conv_commit, reference
from bole_runtime.conv.calls import ConvCall, ConvCommitCall, ConvCommitLayer
from bole_runtime.kernels import Config
from bole_runtime.kernels.variants import get_variant
from bole_testing.cases.base import NAN, random_parents
from bole_testing.close import assert_close, assert_same_bits


def conv_config(bc: int, nb: int, warps: int) -> Config:
    """Return a configuration of the gathering variant, to be pinned."""
    return get_variant("tree_conv", "gather").config({"bc": bc, "nb": nb, "warps": warps})


def rows_config(bc: int, nb: int, warps: int, unroll: int) -> Config:
    """Return a configuration of the variant that takes a node at a time, to be pinned."""
    return get_variant("tree_conv", "rows").config({"bc": bc, "nb": nb, "unroll": unroll, "warps": warps})


#: Of an fp32 output, relative in the Frobenius norm.
BOUND = 1e-6


@dataclass(frozen=True)
class ConvDraw:
    """A random convolution.

    Attributes:
        sizes: nodes of each request.
        channels: C.
        width: W.
        extra: inputs that the state keeps beyond W - 1.
        packed: whether the tree is packed.
        pending: capacity of the rings, 0 for none.
        bias: whether there is one.
        silu: whether SiLU follows.
        dynamic: whether every node has weights of its own.
        capture: whether x is copied to a buffer.
        wide_state: whether the state is [slots, L, C] in memory.
        layers: of the commit.
        seed: of everything else.
    """

    sizes: tuple[int, ...]
    channels: int = 8
    width: int = 4
    extra: int = 0
    packed: bool = False
    pending: int = 0
    bias: bool = True
    silu: bool = True
    dynamic: bool = False
    capture: bool = False
    wide_state: bool = False
    layers: int = 1
    seed: int = 0


def conv_draws(max_nodes: int, max_batch: int, max_channels: int = 40) -> st.SearchStrategy[ConvDraw]:
    """Return random convolutions of everything that may differ."""
    flag = st.booleans()
    return st.builds(
        ConvDraw,
        sizes=st.lists(st.integers(0, max_nodes), min_size=1, max_size=max_batch).map(tuple),
        channels=st.integers(1, max_channels),
        width=st.integers(2, 8),
        extra=st.sampled_from((0, 0, 1, 3)),
        packed=flag,
        pending=st.sampled_from((0, 0, 1, 5)),
        bias=flag,
        silu=flag,
        dynamic=st.sampled_from((False, False, False, True)),
        capture=flag,
        wide_state=flag,
        layers=st.integers(1, 3),
        seed=st.integers(0, 2**20),
    )


@dataclass
class Problem:
    """Tensors of a draw."""

    tree: TreeBatch
    slots: torch.Tensor
    layers: list[dict[str, Any]]
    accepted: torch.Tensor


def conv_tree(rows: Sequence[Sequence[int]], packed: bool, device: torch.device | str = "cpu") -> TreeBatch:
    """Build a tree from the parents of each request; dense rows are padded, packed ones have two rows too many."""
    longest = max(1, *(len(row) for row in rows))
    if not packed:
        dense = [[*row, *[-2] * (longest - len(row))] for row in rows]
        return TreeBatch.from_parents(torch.tensor(dense, dtype=torch.int32, device=device))
    flat = [p for row in rows for p in row] + [-2, -2]
    ends = [sum(len(row) for row in rows[:i]) for i in range(len(rows) + 1)]
    at = {"dtype": torch.int32, "device": device}
    return TreeBatch.from_packed(torch.tensor(flat, **at), torch.tensor(ends, **at), longest)


def make_conv(draw: ConvDraw, device: torch.device | str, dtype: torch.dtype, state_dtype: torch.dtype) -> Problem:
    """Return the tensors of a draw. Whatever must not be read holds NaN; x and out are columns of wider buffers."""
    rng, gen = random.Random(draw.seed), torch.Generator().manual_seed(draw.seed)
    tree = conv_tree([random_parents(rng, n, padding=0.2) for n in draw.sizes], draw.packed, device)
    batch, channels = tree.max_batch, draw.channels
    pool_slots = batch + 2
    slots = rng.sample(range(pool_slots), batch)
    if batch > 1 and rng.random() < 0.5:
        slots[rng.randrange(batch)] = -1
    index, live = (t.cpu() for t in tree.rows())
    live &= (torch.tensor(slots) >= 0).unsqueeze(1)
    dead = torch.ones(tree.max_total, dtype=torch.bool)
    dead[index[live]] = False
    lengths = [rng.randint(0, draw.pending) for _ in range(pool_slots)]
    starts = [rng.randrange(max(1, draw.pending)) for _ in range(pool_slots)]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen)

    layers = []
    for _ in range(draw.layers):
        flat = normal(tree.max_total, channels + 7)
        flat[dead] = NAN
        x = flat.to(dtype).to(device).reshape(*tree.lead, -1)[..., 4 : 4 + channels]
        weight = normal(*(tree.lead if draw.dynamic else ()), channels, draw.width)
        if draw.dynamic:
            weight.reshape(-1, channels, draw.width)[dead] = NAN
        length = draw.width - 1 + draw.extra
        state = normal(pool_slots, length, channels) if draw.wide_state else normal(pool_slots, channels, length)
        state[[s for s in range(pool_slots) if s not in slots]] = NAN
        state = state.to(state_dtype).to(device)
        layer: dict[str, Any] = {
            "x": x,
            "weight": weight.to(dtype).to(device),
            "bias": normal(channels).to(device) if draw.bias else None,
            "state": state.transpose(1, 2) if draw.wide_state else state,
            "activation": "silu" if draw.silu else None,
        }
        if draw.pending:
            ring = normal(pool_slots, draw.pending, channels)
            for s in range(pool_slots):
                used = {(starts[s] + t) % draw.pending for t in range(lengths[s])}
                ring[s, [i for i in range(draw.pending) if i not in used]] = NAN
            tensors = (torch.tensor(v, dtype=torch.int32, device=device) for v in (lengths, starts))
            layer["pending"] = ConvPending(ring.to(dtype).to(device), *tensors)
        layers.append(layer)
    accepted = [rng.choice([-1, *(i for i, on in enumerate(row) if on)]) for row in live.tolist()]
    index_dtype = rng.choice((torch.int32, torch.int64))
    return Problem(
        tree,
        torch.tensor(slots, dtype=index_dtype, device=device),
        layers,
        torch.tensor(accepted, dtype=index_dtype, device=device),
    )


def reference_conv(tree: TreeBatch, slots: torch.Tensor, layer: dict[str, Any]) -> torch.Tensor:
    """Return the float64 output of a layer."""
    x, weight = layer["x"], layer["weight"]
    call = ConvCall(
        x, weight, layer["bias"], layer["state"], slots, tree, layer["activation"] is not None,
        torch.empty(x.shape, dtype=torch.float64, device=x.device), layer.get("pending"),
    )  # fmt: skip
    reference.tree_conv(call)
    return call.out


def reference_commit(pool: torch.Tensor, slots: torch.Tensor, factors: ConvFactors, accepted: torch.Tensor) -> None:
    """Commit a pool in place, node by node."""
    reference.conv_commit(ConvCommitCall((ConvCommitLayer(pool, factors),), slots, accepted, factors.tree))


def live_rows(tree: TreeBatch) -> torch.Tensor:
    """Return the flat rows that some request owns, live or not, bool [max_total]."""
    owned = torch.ones(tree.max_total, dtype=torch.bool, device=tree.device)
    if tree.offsets is not None:
        owned[int(tree.offsets[-1]) :] = False
    return owned


def run_conv_draw(
    draw: ConvDraw, device: torch.device | str, dtype: torch.dtype, state_dtype: torch.dtype, **options: Any
) -> None:
    """Run a draw and its commit; raises AssertionError when something differs from the reference.

    Args:
        draw: what to run.
        device: of the tensors.
        dtype: of x and weight.
        state_dtype: of the pools.
        **options: ``conv`` and ``commit`` variants to pin.
    """
    made = make_conv(draw, device, dtype, state_dtype)
    tree, slots = made.tree, made.slots
    owned = live_rows(tree)
    pools, factors = [], []
    for layer in made.layers:
        x = layer["x"]
        out = torch.full((*x.shape[:-1], draw.channels + 3), NAN, device=device)[..., 2 : 2 + draw.channels]
        capture = None
        if draw.capture:
            capture = ConvFactors.allocate(tree, channels=draw.channels, width=draw.width, dtype=dtype)
        before = layer["state"].clone()
        got, kept = tree_conv(**layer, slots=slots, tree=tree, out=out, factors=capture, variant=options.get("conv"))
        assert got is out
        assert_same_bits("state before the commit", layer["state"], before)
        want = reference_conv(tree, slots, layer).flatten(0, -2)[owned]
        assert_close("output", got.flatten(0, -2)[owned], want, BOUND)
        assert bool((got.flatten(0, -2)[owned][(want == 0).all(1)] == 0).all())
        if capture is not None:
            x.fill_(NAN)  # the commit reads the buffer
        pools.append(layer["state"])
        factors.append(kept)
    wanted = [pool.clone() for pool in pools]
    for pool, part in zip(wanted, factors, strict=True):
        reference_commit(pool, slots, part, made.accepted)
    if draw.seed % 3 == 0:
        prepare_conv_commit(pools, factors, variant=options.get("commit"))(slots, made.accepted)
    else:
        single = len(pools) == 1
        conv_commit(
            pools[0] if single else pools, slots, factors[0] if single else factors, made.accepted,
            variant=options.get("commit"),
        )  # fmt: skip
    for pool, ref in zip(pools, wanted, strict=True):
        assert_same_bits("state", pool, ref)
