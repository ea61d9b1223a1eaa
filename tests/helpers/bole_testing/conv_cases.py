"""Cases of convolutions along trees that know nothing of a backend: the torch, interpreter and GPU tests run them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from bole_runtime import ConvFactors, ConvPending, TreeBatch, conv_commit, tree_conv
from bole_testing.cases.base import NAN, random_parents
from bole_testing.close import assert_close, assert_same_bits
from bole_testing.conv import BOUND, conv_tree

Device = torch.device | str

CASES: list[Callable[[Device], None]] = []


def _case(body: Callable[[Device], None]) -> Callable[[Device], None]:
    CASES.append(body)
    return body


def normal(*shape: int, device: Device, seed: int = 0) -> torch.Tensor:
    """Return random numbers, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def plain_conv(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> torch.Tensor:
    """Return the output after the last of the tokens [T, C], T >= W, float64 [C], by torch's own convolution."""
    x = tokens.double().T.unsqueeze(0)
    wide = None if bias is None else bias.double()
    out = torch.nn.functional.conv1d(x, weight.double().unsqueeze(1), wide, groups=x.shape[1])[0, :, -1]
    return torch.nn.functional.silu(out) if silu else out


def indices(values: Sequence[int], device: Device) -> torch.Tensor:
    """Return int32 indices."""
    return torch.tensor(list(values), dtype=torch.int32, device=device)


@_case
def accepted_path_is_0_2_4(device: Device) -> None:
    tree = conv_tree([[-1, 0, 0, 1, 2]], False, device)
    x, weight = normal(1, 5, 6, device=device), normal(6, 4, device=device, seed=1)
    pool = normal(2, 6, 3, device=device, seed=2)
    before = pool.clone()
    out, factors = tree_conv(x, weight, state=pool, slots=indices([1], device), tree=tree, activation=None)
    for node, path in enumerate(([0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4])):
        tokens = torch.cat((before[1].T, x[0, path]))
        assert_close(f"node {node}", out[0, node], plain_conv(tokens, weight, None, False), BOUND)
    conv_commit(pool, indices([1], device), factors, indices([4], device))
    assert_same_bits("state", pool[1], x[0, [0, 2, 4]].T)
    assert_same_bits("other slot", pool[0], before[0])


@_case
def a_short_path_keeps_the_newest_of_the_prefix(device: Device) -> None:
    tree = conv_tree([[-1, 0]], False, device)
    x, pool = normal(1, 2, 5, device=device), normal(1, 5, 5, device=device, seed=2)
    before = pool.clone()
    factors = ConvFactors(x, 4, tree)
    conv_commit(pool, indices([0], device), factors, indices([1], device))
    assert_same_bits("state", pool[0].T, torch.cat((before[0].T[2:], x[0])))


@_case
def nothing_the_root_or_a_leaf_is_accepted(device: Device) -> None:
    tree = conv_tree([[-1, 0, 1, 1]] * 3, False, device)
    x, pool = normal(3, 4, 6, device=device), normal(4, 6, 3, device=device, seed=2)
    before, slots = pool.clone(), indices([3, 0, 2], device)
    _, factors = tree_conv(x, normal(6, 4, device=device, seed=1), state=pool, slots=slots, tree=tree)
    conv_commit(pool, slots, factors, indices([-1, 0, 3], device))
    assert_same_bits("row 0", pool[3], before[3])
    assert_same_bits("row 1", pool[0].T, torch.cat((before[0].T[1:], x[1, :1])))
    assert_same_bits("row 2", pool[2].T, x[2, [0, 1, 3]])
    assert_same_bits("unused slot", pool[1], before[1])


@_case
def padding_slots_and_nan(device: Device) -> None:
    tree = conv_tree([[-1, 0, -2, 1]] * 3, False, device)
    x, weight = normal(3, 4, 6, device=device), normal(6, 3, device=device, seed=1)
    bias = normal(6, device=device, seed=4)
    x[1:] = NAN
    x[0, 2] = NAN
    pool = normal(3, 6, 2, device=device, seed=2)
    pool[:2] = NAN
    before, slots = pool.clone(), indices([2, -1, -1], device)
    out, factors = tree_conv(x, weight, bias, state=pool, slots=slots, tree=tree)
    assert bool(torch.isfinite(out).all())
    assert bool((out[1:] == 0).all())
    assert bool((out[0, 2] == 0).all())
    conv_commit(pool, slots, factors, indices([3, 3, 3], device))
    assert_same_bits("slot 2", pool[2].T, x[0, [1, 3]])
    assert_same_bits("the others", pool[:2], before[:2])


@_case
def a_chain_is_a_plain_convolution(device: Device) -> None:
    nodes, channels, width = 11, 9, 4
    tree = TreeBatch.chain(2, nodes, device)
    x, weight = normal(2, nodes, channels, device=device), normal(channels, width, device=device, seed=1)
    bias, pool = normal(channels, device=device, seed=3), normal(2, channels, width - 1, device=device, seed=2)
    slots = indices([1, 0], device)
    out, factors = tree_conv(x, weight, bias, state=pool, slots=slots, tree=tree)
    tokens = torch.cat((pool[slots.long()].transpose(1, 2), x), 1).double().transpose(1, 2)
    want = torch.nn.functional.conv1d(tokens, weight.double().unsqueeze(1), bias.double(), groups=channels)
    assert_close("output", out, torch.nn.functional.silu(want).transpose(1, 2), BOUND)
    conv_commit(pool, slots, factors, indices([nodes - 1] * 2, device))
    assert_same_bits("state", pool[slots.long()], x[:, 1 - width :].transpose(1, 2))


@_case
def packed_is_dense(device: Device) -> None:
    rng = random.Random(3)
    rows = [random_parents(rng, n) for n in (7, 1, 5)]
    dense, packed = conv_tree(rows, False, device), conv_tree(rows, True, device)
    x, weight = normal(3, 7, 10, device=device), normal(10, 4, device=device, seed=1)
    flat = torch.full((packed.max_total, 10), NAN, device=device)
    flat[:13] = torch.cat([x[b, : len(row)] for b, row in enumerate(rows)])
    pools = [normal(4, 10, 3, device=device, seed=2) for _ in range(2)]
    slots, accepted = indices([3, 0, 1], device), indices([6, 0, 2], device)
    out, factors = tree_conv(x, weight, state=pools[0], slots=slots, tree=dense)
    other, packed_factors = tree_conv(flat, weight, state=pools[1], slots=slots, tree=packed)
    assert_same_bits("output", other[:13], torch.cat([out[b, : len(row)] for b, row in enumerate(rows)]))
    conv_commit(pools[0], slots, factors, accepted)
    conv_commit(pools[1], slots, packed_factors, accepted)
    assert_same_bits("state", pools[1], pools[0])


@_case
def a_range_of_columns_alone(device: Device) -> None:
    # The v part of a packed projection, and of a pool for all parts; the output goes to its columns of another buffer.
    tree = conv_tree([[-1, 0, 0, 2, 3], [-1, -1, 1]], False, device)
    whole, weight = normal(2, 5, 24, device=device), normal(24, 4, device=device, seed=1)
    pool, slots = normal(3, 24, 3, device=device, seed=2), indices([2, 0], device)
    whole[1, 3:] = NAN
    full, _ = tree_conv(whole, weight, state=pool, slots=slots, tree=tree)
    part = slice(16, 24)
    target = torch.zeros(2, 5, 24, device=device)
    out, factors = tree_conv(
        whole[..., part], weight[part], state=pool[:, part], slots=slots, tree=tree, out=target[..., part]
    )
    assert_same_bits("output", out, full[..., part])
    assert bool((target[..., :16] == 0).all())
    assert factors.x.data_ptr() == whole[..., part].data_ptr()
    before = pool.clone()
    conv_commit(pool[:, part], slots, factors, indices([4, 2], device))
    assert_same_bits("other channels", pool[:, :16], before[:, :16])
    assert_same_bits("state", pool[2, part].T, whole[0, [2, 3, 4], part])


@_case
def pending_inputs_are_ancestors(device: Device) -> None:
    rng = random.Random(5)
    tree = conv_tree([random_parents(rng, 6), random_parents(rng, 6)], False, device)
    x, weight = normal(2, 6, 8, device=device), normal(8, 4, device=device, seed=1)
    slots = indices([1, 2], device)
    for lengths in ((0, 1), (2, 5)):
        pool, ring = normal(3, 8, 3, device=device, seed=2), normal(3, 5, 8, device=device, seed=3)
        pending = ConvPending(ring, indices([0, *lengths], device), indices([0, 3, 4], device))
        flushed = pool.clone()
        for row, (slot, length) in enumerate(zip((1, 2), lengths, strict=True)):
            at = [(int(pending.start[slot]) + t) % 5 for t in range(length)]
            flushed[slot] = torch.cat((pool[slot].T, ring[slot, at]))[-3:].T
            assert row < 2
        out, factors = tree_conv(x, weight, state=pool, slots=slots, tree=tree, pending=pending)
        want, plain = tree_conv(x, weight, state=flushed, slots=slots, tree=tree)
        assert_same_bits("output", out, want)
        accepted = indices([0, 5], device)
        conv_commit(pool, slots, factors, accepted)
        conv_commit(flushed, slots, plain, accepted)
        assert_same_bits("state", pool[1:], flushed[1:])


@_case
def one_slot_for_two_requests(device: Device) -> None:
    tree = conv_tree([[-1, 0, 1], [-1, 0, 0]], False, device)
    x, weight = normal(2, 3, 7, device=device), normal(7, 2, device=device, seed=1)
    pool = normal(2, 7, 1, device=device, seed=2)
    out, _ = tree_conv(x, weight, state=pool, slots=indices([1, 1], device), tree=tree)
    for b in range(2):
        alone = conv_tree([[[-1, 0, 1], [-1, 0, 0]][b]], False, device)
        want, _ = tree_conv(x[b : b + 1], weight, state=pool, slots=indices([1], device), tree=alone)
        assert_same_bits(f"request {b}", out[b : b + 1], want)


@_case
def rounds_are_plain_decoding(device: Device) -> None:
    rng, width, channels = random.Random(8), 4, 5
    weight, bias = normal(channels, width, device=device, seed=1), normal(channels, device=device, seed=2)
    pool = torch.zeros(1, channels, width - 1, device=device)
    tokens = list(pool[0].T)
    slots = indices([0], device)
    for step, nodes in enumerate((8, 1, 5, 3, 1, 8)):
        tree = conv_tree([random_parents(rng, nodes, roots=0.0)], False, device)
        x = normal(1, nodes, channels, device=device, seed=10 + step)
        out, factors = tree_conv(x, weight, bias, state=pool, slots=slots, tree=tree)
        terminal = rng.randrange(nodes)
        for node in tree.path(0, terminal):
            tokens.append(x[0, node])
            assert_close("output", out[0, node], plain_conv(torch.stack(tokens), weight, bias, True), BOUND)
        conv_commit(pool, slots, factors, indices([terminal], device))
        assert_same_bits("state", pool[0].T, torch.stack(tokens[1 - width :]))


@_case
def the_topology_changes_in_place(device: Device) -> None:
    tree = conv_tree([[-1, 0, 1, 2]], False, device)
    x, weight = normal(1, 4, 6, device=device), normal(6, 4, device=device, seed=1)
    pool, slots = normal(1, 6, 3, device=device, seed=2), indices([0], device)
    tree_conv(x, weight, state=pool, slots=slots, tree=tree)
    tree.update_(torch.tensor([[-1, 0, 0]], dtype=torch.int32, device=device))
    out, _ = tree_conv(x, weight, state=pool, slots=slots, tree=tree, activation=None)
    want = plain_conv(torch.cat((pool[0].T, x[0, [0, 2]])), weight, None, False)
    assert_close("node 2", out[0, 2], want, BOUND)
    assert bool((out[0, 3] == 0).all())


@_case
def large_and_very_negative_sums(device: Device) -> None:
    tree = TreeBatch.chain(1, 4, device)
    x = torch.tensor([65504.0, -65504.0, 65504.0, -1.0], device=device).half().reshape(1, 4, 1).expand(1, 4, 16)
    weight = torch.ones(16, 2, device=device).half()
    pool = torch.zeros(1, 16, 1, device=device).half()
    out, _ = tree_conv(x.contiguous(), weight, state=pool, slots=indices([0], device), tree=tree)
    assert out[0, :, 0].tolist() == [65504.0, 0.0, 0.0, 65504.0]  # sums in fp32; 65503 rounds to 65504
    x = torch.full((1, 4, 16), -200.0, device=device)
    out, _ = tree_conv(x, weight.float(), state=pool, slots=indices([0], device), tree=tree)
    assert bool((out.abs() < 1e-30).all())


@_case
def unchecked_indices_touch_nothing(device: Device) -> None:
    tree = conv_tree([[-1, 0, -2]] * 4, False, device)
    x, weight = normal(4, 3, 6, device=device), normal(6, 3, device=device, seed=1)
    pool = normal(4, 6, 2, device=device, seed=2)
    before = pool.clone()
    slots = indices([1, 4, 0, 3], device)
    out, factors = tree_conv(x, weight, state=pool, slots=slots, tree=tree, validate=False)
    assert bool((out[1] == 0).all()), "a slot beyond the pool is padding"
    # A padding node, a live node of a padding row, a node beyond the tree, a negative one that is not -1.
    conv_commit(pool, slots, factors, indices([2, 1, 3, -7], device), validate=False)
    assert_same_bits("state", pool, before)


@_case
def weights_of_each_node_on_a_chain(device: Device) -> None:
    # As Jet-Nemotron generates them: every token's window, oldest first, times weights of its own.
    nodes, channels, width = 7, 6, 4
    x, weight = normal(1, nodes, channels, device=device), normal(1, nodes, channels, width, device=device, seed=1)
    pool = normal(1, channels, width, device=device, seed=2)  # one input more than is needed
    tree, slots = TreeBatch.chain(1, nodes, device), indices([0], device)
    out, factors = tree_conv(x, weight, state=pool, slots=slots, tree=tree)
    windows = torch.cat((pool[0].T, x[0])).double().unfold(0, width, 1)[1:]
    assert_close("output", out[0], torch.nn.functional.silu((windows * weight[0].double()).sum(-1)), BOUND)
    conv_commit(pool, slots, factors, indices([nodes - 1], device))
    assert_same_bits("state", pool[0].T, x[0, -width:])
