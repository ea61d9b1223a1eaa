"""The commit policies: equal to one another and to sequential decoding, row by row as decided on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from bole_testing.close import assert_close, assert_same_bits, relative_norm
from bole_testing.serving import LAYERS, Server

from bole_runtime import Factors, LayerGeometry, StateManager, TreeBatch
from bole_runtime.calls import RowAction
from bole_runtime.reference import commit_sequential

POLICIES: dict[str, dict[str, Any]] = {
    "eager": {"policy": "eager"},
    "fused": {"policy": "fused"},
    "deferred": {"policy": "deferred", "pending": 16},
    "deferred, early": {"policy": "deferred", "pending": 16, "flush_at": 6},
}
ONE = LayerGeometry(1, 2, 8, 8)


def rounds(count: int, sizes: dict[str, Any], layers: tuple[LayerGeometry, ...]) -> Server:
    """Run the same rounds under a policy: what is drawn does not depend on it."""
    server = Server(3, layers=layers, output_bound=None, **sizes)
    for _ in range(4):
        server.allocate()
    for n in range(count):
        server.round()
        if n % 50 == 49:
            server.check()
    server.manager.materialise()
    server.check()
    return server


def compare(count: int, layers: tuple[LayerGeometry, ...], names: Sequence[str] = tuple(POLICIES)[:3]) -> None:
    servers = {name: rounds(count, POLICIES[name], layers) for name in names}
    first = servers["eager"].manager.request
    for name, server in servers.items():
        assert server.accepted_tokens == servers["eager"].accepted_tokens > count
        for n, (pool, ref) in enumerate(zip(server.manager.request.pools, first.pools, strict=True)):
            assert_close(f"{name} against eager, layer {n}", pool, ref, 2e-6)
        for n, (conv, want) in enumerate(zip(server.manager.request.conv_pools, first.conv_pools, strict=True)):
            if conv is not None and want is not None:
                assert_same_bits(f"{name} against eager, convolution {n}", conv, want)


def test_policies_agree_over_a_hundred_rounds() -> None:
    compare(100, (ONE,))


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_policies_agree_over_a_thousand_rounds_of_three_layers() -> None:
    compare(1000, LAYERS, tuple(POLICIES))


class Bench:
    """One layer, one batch, inputs by hand."""

    def __init__(self, tree: TreeBatch, layer: LayerGeometry = ONE, slots: int = 4, **sizes: Any) -> None:
        given = {"max_batch": tree.max_batch, "max_nodes": tree.max_nodes, "dtype": torch.float32, **sizes}
        self.manager = StateManager([layer], slots=slots, **given)
        self.layer, self.tree = layer, tree
        self.generator = torch.Generator().manual_seed(0)
        self.exact = torch.zeros(slots, *layer.state_shape, dtype=torch.float64)
        self.single = self.exact.float()
        self.slots = torch.tensor([self.manager.allocate() for _ in range(tree.max_batch)], dtype=torch.int32)
        self.round = self.manager.round(tree, self.slots)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def step(self, accepted: list[int]) -> torch.Tensor:
        lead, y = self.tree.lead, self.layer
        q, k, v = self.normal(*lead, 1, 8), self.normal(*lead, 1, 8), self.normal(*lead, 2, 8)
        gates = {"g": -self.normal(*lead, 2).abs() * 0.1, "beta": self.normal(*lead, 2).sigmoid()}
        if y.channels:
            self.round.conv(0, self.normal(*lead, y.channels), torch.ones(y.channels, y.conv_width))
        out = self.round.verify(0, q, k, v, gates=gates)
        ends = torch.tensor(accepted)
        self.round.commit(ends)
        part = Factors(y.spec, "ready", k, v, gates, 1.0, True, self.tree)
        for state in (self.exact, self.single):
            new = commit_sequential(state, self.slots, part, ends, dtype=state.dtype)
            for b, (slot, node) in enumerate(zip(self.slots.tolist(), accepted, strict=True)):
                if slot >= 0 <= node:
                    state[slot] = new[b]
        return out


@pytest.mark.parametrize("name", POLICIES)
def test_no_drift_over_sixty_four_rounds(name: str) -> None:
    bench = Bench(TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 1, 2, 4]])), **POLICIES[name])
    for n in range(64):
        bench.step([(-1, 0, 3, 5)[n % 4]])
    bench.manager.materialise()
    slot = int(bench.slots[0])
    drift = relative_norm(bench.manager.request.pools[0][slot], bench.exact[slot])
    allowed = 2 * relative_norm(bench.single[slot], bench.exact[slot])
    assert drift <= allowed, f"drift {drift:.3g} after 64 rounds, twice the fp32 recurrence's is {allowed:.3g}"


def test_deferred_rows_wait_until_their_own_chain_is_full() -> None:
    chains = TreeBatch.from_parents(torch.tensor([[-1, 0, 1, 2]] * 3))
    bench = Bench(chains, policy="deferred", pending=8, flush_at=7)
    counters = bench.manager.request.counters
    seen = []
    for accepted in ([3, 0, -1], [2, 0, -1], [0, 3, 1], [0, 0, -1]):
        before = bench.manager.request.pools[0].clone()
        bench.step(accepted)
        seen.append((bench.round.actions.tolist(), counters.length[bench.slots.long()].tolist()))
        for row, action in enumerate(bench.round.actions.tolist()):
            same = torch.equal(bench.manager.request.pools[0][bench.slots[row]], before[bench.slots[row]])
            assert same == (action != RowAction.COMMIT)
    none, commit, append = int(RowAction.NONE), int(RowAction.COMMIT), int(RowAction.APPEND)
    assert seen == [
        ([append, append, none], [4, 1, 0]),
        ([append, append, none], [7, 2, 0]),
        ([commit, append, append], [0, 6, 2]),
        ([append, append, none], [1, 7, 2]),
    ]


def test_a_path_longer_than_the_ring_is_committed_at_once() -> None:
    for policy in ("fused", "deferred"):
        bench = Bench(TreeBatch.chain(1, 6), policy=policy, pending=3)
        for accepted in (5, 1, 4, 2, 5, 0):
            bench.step([accepted])
        bench.manager.materialise()
        slot = int(bench.slots[0])
        assert_close(policy, bench.manager.request.pools[0][slot], bench.exact[slot], 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", POLICIES)
def test_narrow_pools_round_where_a_state_is_written(name: str, dtype: torch.dtype) -> None:
    # Under a deferred commit a state is rounded once for many tokens, so it is nearer to the exact one.
    bench = Bench(TreeBatch.chain(1, 4), state_dtype=dtype, **POLICIES[name])
    for accepted in (3, 1, 2, 0, 3):
        bench.step([accepted])
    bench.manager.materialise()
    slot = int(bench.slots[0])
    pool = bench.manager.request.pools[0]
    assert pool.dtype is dtype
    assert_close(name, pool[slot], bench.exact[slot], 5 * (2**-8 if dtype is torch.bfloat16 else 2**-11))


@pytest.mark.parametrize("name", POLICIES)
def test_rounds_repeat_bit_for_bit(name: str) -> None:
    pools = []
    for _ in range(2):
        bench = Bench(TreeBatch.chain(2, 4), **POLICIES[name])
        for accepted in ([3, 0], [1, -1], [2, 3]):
            bench.step(accepted)
        bench.manager.materialise()
        pools.append(bench.manager.request.pools[0])
    assert_same_bits(name, *pools)
