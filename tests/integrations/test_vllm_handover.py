"""Requests that go from vLLM's N + 1 states to Bole and back, between rounds and in the middle of one."""

from __future__ import annotations

import random

import pytest
import torch
from bole_testing.close import assert_close, assert_same_bits
from vllm_pages import Memory, Sizes, block_table, random_step, token_inputs, vllm_step, weights
from vllm_rounds import bole_step, layout_of, pools_of, rounds_of

from bole_runtime.integrations import vllm

ROWS, PADDING, BLOCKS = 3, 2, 20


class Side:
    """One memory, who serves it, and how many tokens count as accepted in it."""

    def __init__(self, memory: Memory) -> None:
        self.memory, self.pools = memory, pools_of(memory)
        self.rounds = rounds_of(self.pools, memory.sizes.drafts + 1)
        self.accepted = torch.ones(ROWS + PADDING, dtype=torch.int32)


def check_same(name: str, want: Side, got: Side, table: torch.Tensor) -> None:
    """The state and window of every request, wherever each side has them."""
    s = want.memory.sizes
    for layer in range(s.layers):
        for r in range(ROWS):
            a, b = int(want.accepted[r]) - 1, int(got.accepted[r]) - 1
            states = [x.memory.state(layer, int(table[r, at])) for x, at in ((want, a), (got, b))]
            assert_close(f"{name} row {r} state", states[1], states[0], 1e-6)
            ends = [x.memory.conv(layer, int(table[r, 0]))[:, at : at + s.width - 1] for x, at in ((want, a), (got, b))]
            assert_same_bits(f"{name} row {r} window", ends[1], ends[0])


@pytest.mark.parametrize("family", ["gdn", "mamba2"])
@pytest.mark.parametrize("order", vllm.layout.CONV_ORDERS)
def test_requests_change_hands(family: str, order: str) -> None:
    torch.manual_seed(6)
    rng = random.Random(7)
    s = Sizes(family=family, order=order)
    memory = Memory(s, BLOCKS)
    memory.fill()
    theirs, ours = Side(memory), Side(memory.copy())
    table = block_table(rng, s, BLOCKS, ROWS, PADDING)
    ws = [weights(s) for _ in range(s.layers)]
    # vLLM; to Bole between two rounds; back between two; to Bole; back within a round; vLLM; to Bole again.
    turns = ("vllm", "vllm", "bole", "bole", "vllm", "bole", "back", "vllm", "bole")
    for turn, who in enumerate(turns):
        starts, took = random_step(rng, s, ROWS, PADDING)
        lengths = starts[1:] - starts[:-1]
        given = [token_inputs(s, int(starts[-1])) for _ in range(s.layers)]
        want = [vllm_step(memory, n, ws[n], given[n], table, theirs.accepted, starts) for n in range(s.layers)]
        if who == "vllm":
            got = [vllm_step(ours.memory, n, ws[n], given[n], table, ours.accepted, starts) for n in range(s.layers)]
            ours.accepted = took
        else:
            before = ours.memory.copy()
            vllm.take_over(ours.pools, table, ours.accepted)
            ours.accepted = torch.ones_like(took)
            for block in set(range(BLOCKS)) - set(table[:, 0].tolist()) | {0}:
                assert_same_bits("another block", ours.memory.state(0, block), before.state(0, block))
                assert_same_bits("another window", ours.memory.conv(0, block), before.conv(0, block))
            got = bole_step(s, ours.rounds, ws, given, table, starts)
            current = ours.rounds.batch(ROWS + PADDING)
            if who == "bole":
                current.commit(vllm.home_slots(table), vllm.accepted_nodes(table, took))
            else:
                before = ours.memory.copy()
                vllm.hand_back(ours.pools, table, current.factors, current.inputs, lengths)
                ours.accepted = took
                check_steps(theirs, ours, table, lengths, before)
        theirs.accepted = took
        for n in range(s.layers):
            assert_close(f"turn {turn} ({who}) layer {n}", got[n], want[n], 1e-6)
        check_same(f"turn {turn} ({who})", theirs, ours, table)


def check_steps(theirs: Side, ours: Side, table: torch.Tensor, lengths: torch.Tensor, before: Memory) -> None:
    """Memory is what vLLM's own step would have left, column by column; what it writes not is as it was."""
    s = theirs.memory.sizes
    for layer in range(s.layers):
        for r in range(ROWS):
            length, home = int(lengths[r]), int(table[r, 0])
            for n, block in enumerate(table[r].tolist()):
                if n < length:
                    state = theirs.memory.state(layer, block)
                    assert_close(f"row {r} column {n}", ours.memory.state(layer, block), state, 1e-6)
                else:
                    assert_same_bits("no token", ours.memory.state(layer, block), before.state(layer, block))
            ends = s.width - 2 + length
            columns = ours.memory.conv(layer, home)
            assert torch.equal(columns[:, :ends], theirs.memory.conv(layer, home)[:, :ends])
            assert torch.equal(columns[:, ends:], before.conv(layer, home)[:, ends:])
        assert_same_bits("null block", ours.memory.state(layer, 0), before.state(layer, 0))


def test_stale_counts_of_padding_rows() -> None:
    s = Sizes(layers=1)
    memory = Memory(s, 4)
    memory.fill()
    before = memory.raw.clone()
    table = torch.zeros(3, 4, dtype=torch.int32)
    for stale in (0, -7, 1000):
        accepted = torch.full((3,), stale, dtype=torch.int32)
        assert vllm.accepted_slots(table, accepted).tolist() == [-1] * 3
        assert vllm.accepted_nodes(table, accepted).tolist() == [-1] * 3
        vllm.take_over(pools_of(memory), table, accepted)
        assert_same_bits("nothing", memory.raw, before)


def test_slots_and_chains() -> None:
    table = torch.tensor([[4, 1, 5], [0, 0, 0], [2, 3, 6]])
    accepted = torch.tensor([3, 1, 2])
    assert vllm.home_slots(table).tolist() == [4, -1, 2]
    assert vllm.accepted_slots(table, accepted).tolist() == [5, -1, 3]
    assert vllm.accepted_nodes(table, accepted).tolist() == [2, -1, 1]
    starts = torch.tensor([0, 3, 4, 6, 6], dtype=torch.int32)
    assert vllm.chain_parents(starts, 3).tolist() == [[-1, 0, 1], [-1, -2, -2], [-1, 0, -2], [-2, -2, -2]]
    tokens = torch.arange(6)
    rows = vllm.to_nodes(tokens, starts, 3)
    assert rows.tolist()[:3] == [[0, 1, 2], [3, 4, 5], [4, 5, 5]]
    assert vllm.to_tokens(rows, starts, 6).tolist() == tokens.tolist()
    assert vllm.to_tokens(rows, starts, 8).shape == (8,)  # tokens that pad a captured batch


def test_errors() -> None:
    s = Sizes(layers=2, hk=1, hv=2)
    memory = Memory(s, 4)
    layout = layout_of(s)
    caches = [layout.split(memory.pages(n)) for n in range(2)]
    with pytest.raises(TypeError, match="pages: dtype"):
        layout.split(memory.pages(0).view(torch.bool))
    with pytest.raises(ValueError, match=f"pages: expected .* {layout.nbytes} contiguous bytes"):
        layout.split(memory.pages(0)[..., : layout.nbytes - 1])
    with pytest.raises(ValueError, match="conv_order: 'DD' is not allowed"):
        vllm.PageLayout(s.geometry, conv_order="DD")
    with pytest.raises(ValueError, match="drafts: -1"):
        vllm.PageLayout(s.geometry, -1)
    with pytest.raises(ValueError, match="at least one layer"):
        vllm.GroupPools.bind(layout, [])
    with pytest.raises(TypeError, match="list or tuple"):
        vllm.GroupPools.bind(layout, caches[0][0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"caches\[0\]: expected 2 states, got 3"):
        vllm.GroupPools.bind(layout, [(*caches[0], caches[0][0])])
    with pytest.raises(TypeError, match=r"caches\[1\]: expected torch.float32, got torch.float64"):
        vllm.GroupPools.bind(layout, [caches[0], (caches[1][0], caches[1][1].double())])
    with pytest.raises(ValueError, match=r"caches\[0\]: expected \[blocks"):
        vllm.GroupPools.bind(layout, [(caches[0][0].transpose(1, 2), caches[0][1])])
    for wrong in ([caches[1], caches[0]], [caches[0], caches[0]], [caches[0], [t.clone() for t in caches[1]]]):
        with pytest.raises(ValueError, match="equally spaced in one allocation"):
            vllm.GroupPools.bind(layout, wrong)
    pools, table = pools_of(memory), torch.tensor([[1, 2, 3, 0]])
    with pytest.raises(TypeError, match="table: dtype"):
        vllm.home_slots(table.float())
    with pytest.raises(ValueError, match=r"table: expected \[requests, N \+ 1\]"):
        vllm.home_slots(table[0])
    with pytest.raises(ValueError, match="accepted"):
        vllm.take_over(pools, table, torch.ones(2, dtype=torch.int32))
    current = rounds_of(pools, 4).batch(1)
    with pytest.raises(ValueError, match="factors: expected 2, one a layer, got 1"):
        vllm.hand_back(pools, table, current.factors[:1], current.inputs, torch.tensor([4]))
    with pytest.raises(ValueError, match="inputs: expected 2, one a layer, got 0"):
        vllm.hand_back(pools, table, current.factors, [], torch.tensor([4]))
    with pytest.raises(ValueError, match="factors: expected dense trees"):
        vllm.hand_back(pools, table[:, :3], current.factors, current.inputs, torch.tensor([3]))
