"""Bole's verify and commit through vLLM's pages, against vLLM's step one token after the other."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from bole_testing.cases.base import random_parents
from bole_testing.close import assert_close, assert_same_bits
from vllm_pages import Memory, Sizes, block_table, one_token, random_step, token_inputs, vllm_step, weights
from vllm_rounds import bole_step, layout_of, pools_of, rounds_of, run_layer

from bole_runtime.integrations import vllm
from bole_runtime.state import shard_channels, shard_heads

ROWS, PADDING, BLOCKS = 3, 2, 20
PLACES = [
    pytest.param(order, outside, id=f"{order}-{'layers' if outside else 'blocks'}")
    for order in vllm.layout.CONV_ORDERS
    for outside in (True, False)
]


@pytest.mark.parametrize(("order", "outside"), PLACES)
def test_views_are_vllms_bytes(order: str, outside: bool) -> None:
    s = Sizes(order=order, conv_dtype=torch.bfloat16, layers=3)
    memory = Memory(s, 5, outside)
    memory.fill()
    layout, pools = layout_of(s), pools_of(memory)
    assert layout.nbytes == memory.page - memory.padding
    assert pools.columns is not None
    assert pools.windows is not None
    for layer in range(s.layers):
        for block in range(5):
            assert_same_bits("state", pools.states[layer, block], memory.state(layer, block))
            assert_same_bits("conv", pools.columns[layer, block], memory.conv(layer, block))
    before = memory.raw.clone()
    pools.states[2, 3] = 1.0
    pools.windows[1, 2] = 2.0
    assert bool((memory.state(2, 3) == 1).all())
    assert bool((memory.conv(1, 2)[:, :3] == 2).all())
    changed = int((before != memory.raw).sum())
    assert 0 < changed <= s.hv * s.dv * s.dk * 4 + s.channels * 3 * 2


@pytest.mark.parametrize("family", ["gdn", "mamba2"])
@pytest.mark.parametrize(("order", "outside"), PLACES)
def test_rounds_of_chains(family: str, order: str, outside: bool) -> None:
    torch.manual_seed(3)
    rng = random.Random(5)
    s = Sizes(family=family, order=order)
    theirs = Memory(s, BLOCKS, outside)
    theirs.fill()
    # Bole's memory has no block of a draft and no column of one.
    ours = Memory(dataclasses.replace(s, drafts=0), ROWS + 2, outside)
    ours.fill()
    table = block_table(rng, s, BLOCKS, ROWS, PADDING)
    home = torch.zeros(ROWS + PADDING, 1, dtype=torch.int32)
    home[:ROWS, 0] = torch.tensor(rng.sample(range(1, ROWS + 2), ROWS), dtype=torch.int32)
    for layer in range(s.layers):
        for r in range(ROWS):
            ours.state(layer, int(home[r])).copy_(theirs.state(layer, int(table[r, 0])))
            ours.conv(layer, int(home[r])).copy_(theirs.conv(layer, int(table[r, 0]))[:, : s.width - 1])
    pools, ws = pools_of(ours), [weights(s) for _ in range(s.layers)]
    rounds = rounds_of(pools, s.drafts + 1)
    accepted = torch.ones(ROWS + PADDING, dtype=torch.int32)
    untouched = [b for b in range(ROWS + 2) if b not in home[:ROWS]]
    idle = (
        [pools.states[:, untouched].clone(), pools.columns[:, untouched].clone()] if pools.columns is not None else []
    )
    for turn in range(5):
        starts, took = random_step(rng, s, ROWS, PADDING)
        given = [token_inputs(s, int(starts[-1])) for _ in range(s.layers)]
        want = [vllm_step(theirs, n, ws[n], given[n], table, accepted, starts) for n in range(s.layers)]
        got = bole_step(s, rounds, ws, given, home, starts)
        accepted = took
        rounds.batch(ROWS + PADDING).commit(vllm.home_slots(home), vllm.accepted_nodes(home, took))
        for n in range(s.layers):
            assert_close(f"turn {turn} layer {n} output", got[n], want[n], 1e-6)
            for r in range(ROWS):
                last = int(took[r]) - 1
                state = theirs.state(n, int(table[r, last]))
                assert_close(f"turn {turn} row {r} state", ours.state(n, int(home[r])), state, 1e-6)
                window = theirs.conv(n, int(table[r, 0]))[:, last : last + s.width - 1]
                assert_same_bits(f"turn {turn} row {r} window", ours.conv(n, int(home[r])), window)
    assert_same_bits("other blocks", pools.states[:, untouched], idle[0])
    assert_same_bits("other windows", pools.columns[:, untouched], idle[1])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("took", [0, 1, 2, 3, 4])
def test_every_accepted_length(took: int, state_dtype: torch.dtype) -> None:
    torch.manual_seed(took)
    s = Sizes(state_dtype=state_dtype, layers=1)
    theirs = Memory(s, 6)
    theirs.fill()
    ours = theirs.copy()
    table, starts = torch.tensor([[4, 1, 5, 2]], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    one, w, given = torch.ones(1, dtype=torch.int32), weights(s), token_inputs(s, 4)
    rounds = rounds_of(pools_of(ours), 4)
    want = vllm_step(theirs, 0, w, given, table, one, starts)
    (got,) = bole_step(s, rounds, [w], [given], table, starts)
    assert_close("output", got, want, 1e-6)
    before = ours.copy()
    rounds.batch(1).commit(vllm.home_slots(table), vllm.accepted_nodes(table, one * took))
    if not took:  # never in vLLM, where the token before the drafts always counts
        assert_same_bits("nothing accepted", ours.raw, before.raw)
        return
    # Both round the state once; two fp32 sums next to a tie can round apart, by 2^-8 in bf16.
    bound = 1e-6 if state_dtype == torch.float32 else 2**-10
    assert_close("state", ours.state(0, 4), theirs.state(0, int(table[0, took - 1])), bound)
    assert_same_bits("window", ours.conv(0, 4)[:, :3], theirs.conv(0, 4)[:, took - 1 : took + 2])
    for block in (0, 1, 2, 3, 5):
        assert_same_bits("another block", ours.state(0, block), before.state(0, block))
        assert_same_bits("another window", ours.conv(0, block), before.conv(0, block))


@pytest.mark.parametrize(("order", "outside"), PLACES)
def test_trees_which_vllm_has_none_of(order: str, outside: bool) -> None:
    torch.manual_seed(8)
    rng, nodes = random.Random(9), 7
    s = Sizes(order=order, drafts=0)
    memory = Memory(s, ROWS + 2, outside)
    memory.fill()
    start = memory.copy()
    slots = torch.tensor([3, 1, 4, -1], dtype=torch.int32)
    parents = torch.tensor([random_parents(rng, nodes, roots=0.0, padding=0.0) for _ in range(4)], dtype=torch.int32)
    accepted = torch.tensor([nodes - 1, 3, -1, 2], dtype=torch.int32)
    ws, given = [weights(s) for _ in range(s.layers)], [token_inputs(s, 4 * nodes) for _ in range(s.layers)]
    current = rounds_of(pools_of(memory), nodes).batch(4)
    current.set_parents(parents)
    dense = [{name: t.unflatten(0, (4, nodes)) for name, t in layer.items()} for layer in given]
    outs = [run_layer(s, current, n, ws[n], dense[n], slots) for n in range(s.layers)]
    current.commit(slots, accepted)
    for layer in range(s.layers):
        for r, slot in enumerate(slots.tolist()[:3]):
            root = start.conv(layer, slot).double(), start.state(layer, slot).double()
            after = {-1: root}
            for node, parent in enumerate(parents[r].tolist()):
                token = {name: t[r, node] for name, t in dense[layer].items()}
                out, *after[node] = one_token(s, ws[layer], *after[parent], token)  # type: ignore[assignment]
                assert_close(f"row {r} node {node}", outs[layer][r, node], out, 2e-6)
            window, state = after[int(accepted[r])]
            assert_close(f"row {r} state", memory.state(layer, slot), state, 1e-6)
            assert_same_bits(f"row {r} window", memory.conv(layer, slot), window.float())


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_have_pages_of_their_own(world: int) -> None:
    torch.manual_seed(2)
    s = Sizes(layers=1)
    theirs = Memory(s, 6)
    theirs.fill()
    start = theirs.copy()
    table, starts = torch.tensor([[4, 1, 5, 2]], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    one, w, given = torch.ones(1, dtype=torch.int32), weights(s), token_inputs(s, 4)
    want = vllm_step(theirs, 0, w, given, table, one, starts)
    for rank in range(world):

        def channels(t: torch.Tensor, dim: int, rank: int = rank) -> torch.Tensor:
            return shard_channels(t, dim, s.geometry, rank, world)

        def heads(t: torch.Tensor, dim: int, rank: int = rank) -> torch.Tensor:
            return shard_heads(t, dim, rank, world)

        part = dataclasses.replace(s, hk=s.hk // world, hv=s.hv // world)
        assert layout_of(part).layer == s.geometry.shard(world)
        ours = Memory(part, 6)
        ours.state(0, 4).copy_(heads(start.state(0, 4), 0))
        ours.conv(0, 4).copy_(channels(start.conv(0, 4), 0))
        own = {name: channels(t, 0) if name == "conv" else heads(t, 0) for name, t in w.items()}
        tokens = {name: channels(t, 1) if name == "x" else heads(t, 1).contiguous() for name, t in given.items()}
        rounds = rounds_of(pools_of(ours), 4)
        (got,) = bole_step(part, rounds, [own], [tokens], table, starts)
        rounds.batch(1).commit(vllm.home_slots(table), vllm.accepted_nodes(table, one * 3))
        assert_close(f"rank {rank} output", got, heads(want, 1), 1e-6)
        assert_close(f"rank {rank} state", ours.state(0, 4), heads(theirs.state(0, 5), 0), 1e-6)
        assert_same_bits(f"rank {rank} window", ours.conv(0, 4)[:, :3], channels(theirs.conv(0, 4)[:, 2:5], 0))
