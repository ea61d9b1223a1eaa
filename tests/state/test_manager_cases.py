"""The cases of the field about states, through a StateManager and under every policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bole_testing.close import assert_close, assert_same_bits
from bole_testing.invariance import check_batch_invariance

from bole_runtime import LayerGeometry, StateManager, TreeBatch, set_backend, verify

POLICIES: dict[str, dict[str, Any]] = {
    "eager": {"policy": "eager"},
    "fused": {"policy": "fused", "pending": 6},
    "deferred": {"policy": "deferred", "pending": 6},
}
LAYER = LayerGeometry(1, 2, 16, 8, conv_width=4)
NAN = float("nan")


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> dict[str, Any]:
    return POLICIES[request.param]


@pytest.fixture
def reference():
    set_backend("reference")
    yield
    set_backend(None)


class Run:
    """Rounds over a manager of two layers; every input is drawn anew."""

    def __init__(self, tree: TreeBatch, slots: list[int], policy: dict[str, Any], count: int = 4) -> None:
        sizes = {"max_batch": tree.max_batch, "max_nodes": tree.max_nodes, "dtype": torch.float32}
        self.manager = StateManager([LAYER, LAYER], slots=count, **sizes, **policy)
        for _ in range(count):
            self.manager.allocate()
        self.generator = torch.Generator().manual_seed(1)
        for t in (*self.manager.request.pools, *self.manager.request.conv_pools):
            assert t is not None
            t.copy_(self.normal(*t.shape))
        self.tree = tree
        self.slots = torch.tensor(slots, dtype=torch.int32)
        self.round = self.manager.round(tree, self.slots)
        self.weight = self.normal(LAYER.channels, 4)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def inputs(self) -> list[dict[str, Any]]:
        lead = self.tree.lead
        made = []
        for _ in range(2):
            gates = {"g": -self.normal(*lead, 2).abs(), "beta": self.normal(*lead, 2).sigmoid()}
            x = self.normal(*lead, LAYER.channels)
            q, k, v = self.normal(*lead, 1, 16), self.normal(*lead, 1, 16), self.normal(*lead, 2, 8)
            made.append({"x": x, "q": q, "k": k, "v": v, "gates": gates})
        return made

    def play(self, layers: list[dict[str, Any]], accepted: list[int]) -> list[torch.Tensor]:
        out = []
        for n, given in enumerate(layers):
            self.round.conv(n, given["x"], self.weight)
            out.append(self.round.verify(n, given["q"], given["k"], given["v"], gates=given["gates"]))
        self.round.commit(torch.tensor(accepted))
        return out

    def held(self) -> list[torch.Tensor]:
        request = self.manager.request
        rings = [t for c in request.chains for t in (c.k, c.v, *c.gates.values())]
        counters = [request.counters.length, request.counters.start]
        return [*request.pools, *(c for c in request.conv_pools if c is not None), *rings, *counters]


def test_padding_rows_touch_nothing(policy: dict[str, Any]) -> None:
    run = Run(TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 1]] * 3)), [2, -1, -1], policy)
    before = [t.clone() for t in run.held()]
    for _ in range(3):
        layers = run.inputs()
        for given in layers:
            for t in (given["x"], given["q"], given["k"], given["v"], *given["gates"].values()):
                t[1:] = NAN
        for out in run.play(layers, [3, 3, 3]):
            assert bool((out[1:] == 0).all())
    run.manager.materialise([2])
    for old, new in zip(before, run.held(), strict=True):
        others = [0, 1, 3]
        assert_same_bits("other slots", new[others], old[others])
        assert bool(torch.isfinite(new[2].double()).all())
    assert not torch.equal(before[0][2], run.held()[0][2])


def test_rows_that_accept_nothing_keep_their_bits(policy: dict[str, Any]) -> None:
    run = Run(TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 1]] * 3)), [3, 0, 2], policy)
    before = [t[3].clone() for t in run.held()]
    run.play(run.inputs(), [-1, 0, 3])
    for old, new in zip(before, run.held(), strict=True):
        assert_same_bits("row that accepts nothing", new[3], old)
    for n in (0, 2):
        assert int(run.manager.request.counters.length[n]) == (0 if policy["policy"] == "eager" else (1, 3)[n // 2])


def test_the_path_is_that_of_the_tree_and_of_the_convolution(policy: dict[str, Any]) -> None:
    # Node 4 is reached by 0, 2, 4; a chain of those tokens must leave the same states.
    tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 1, 2]]))
    run, same = Run(tree, [1], policy), Run(TreeBatch.chain(1, 3), [1], policy)
    before = run.manager.request.conv_pools[0]
    assert before is not None
    prefix = before[1].clone()
    layers, path = run.inputs(), [0, 2, 4]
    run.play(layers, [4])

    def picked(given: dict[str, Any]) -> dict[str, Any]:
        gates = {name: t[:, path] for name, t in given["gates"].items()}
        return {**{n: t[:, path] for n, t in given.items() if n != "gates"}, "gates": gates}

    same.play([picked(given) for given in layers], [2])
    for each in (run, same):
        each.manager.materialise()
    for a, b in zip(run.manager.request.pools, same.manager.request.pools, strict=True):
        assert_close("state", a[1], b[1], 1e-6)
    after = run.manager.request.conv_pools[0]
    assert after is not None
    assert_same_bits("convolution", after[1], torch.cat((prefix, layers[0]["x"][0, path].T), 1)[:, -3:])


def test_two_rounds_equal_plain_decoding(policy: dict[str, Any]) -> None:
    # Round 1 accepts 3 of 8, round 2 is a single node (the rest of its row is padding).
    tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 1, 2, 2, 4, 4]]))
    run, plain = Run(tree, [0], policy), Run(TreeBatch.chain(1, 1), [0], policy)
    first = run.inputs()
    run.play(first, [4])
    run.tree.update_(torch.tensor([[-1] + [-2] * 7]))
    second = run.inputs()
    outputs = run.play(second, [0])
    tokens = [(given, node) for given in (first,) for node in (0, 2, 4)] + [(second, 0)]
    for layers, node in tokens:
        single = [
            {
                **{name: t[:, node : node + 1] for name, t in given.items() if name != "gates"},
                "gates": {name: t[:, node : node + 1] for name, t in given["gates"].items()},
            }
            for given in layers
        ]
        last = plain.play(single, [0])
    for out, want in zip(outputs, last, strict=True):
        assert_close("output", out[:, :1], want, 1e-5)
    for each in (run, plain):
        each.manager.materialise()
    for a, b in zip(run.held()[:4], plain.held()[:4], strict=True):
        assert_close("states", a[0], b[0], 2e-6)


def test_pools_of_the_caller_with_any_slot_stride(policy: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"slots": 3, "max_batch": 2, "max_nodes": 4, "dtype": torch.float32, **policy}
    wide = torch.full((3, 5, 2, 8, 16), NAN)
    convs = torch.full((3, 2, LAYER.channels, 3), NAN)
    pools = [wide[:, 1], wide[:, 4]]
    owned = StateManager([LAYER, LAYER], pools=pools, conv_pools=[convs[:, 0], convs[:, 1]], **sizes)
    made = StateManager([LAYER, LAYER], **sizes)
    for manager in (owned, made):
        slots = torch.tensor([manager.allocate(), manager.allocate()])
        tree = TreeBatch.chain(2, 4)
        rnd = manager.round(tree, slots)
        gen = torch.Generator().manual_seed(5)
        for _ in range(3):
            for n in range(2):
                given = [torch.randn(2, 4, h, d, generator=gen) for h, d in ((1, 16), (1, 16), (2, 8))]
                rnd.conv(n, torch.randn(2, 4, LAYER.channels, generator=gen), torch.ones(LAYER.channels, 4))
                g = -torch.rand(2, 4, 2, generator=gen)
                rnd.verify(n, *given, gates={"g": g, "beta": g.exp()})
            rnd.commit(torch.tensor([3, 1]))
        manager.fork(0)
        manager.materialise()
    for mine, want in zip(owned.request.pools, made.request.pools, strict=True):
        assert_same_bits("pool", mine, want)
    assert owned.request.pools[0].data_ptr() == pools[0].data_ptr()
    assert bool(wide[:, [0, 2, 3]].isnan().all())


def test_a_request_gets_the_same_bits_alone_and_in_a_batch(policy: dict[str, Any], reference: None) -> None:
    # The torch backend multiplies whole batches and promises no such thing; tests/interpreter runs the kernels.
    check_batch_invariance({"slots": 5, "max_batch": 4, "max_nodes": 7, **policy})


def test_the_tree_of_a_round_changes_in_place(policy: dict[str, Any]) -> None:
    run = Run(TreeBatch(2, 5), [0, 1], policy)
    for parents, ends in (([[-1, 0, 1, 2, 3]] * 2, [4, 2]), ([[-1, 0, 0, 0, 0], [-1, -1, 1, 2, -2]], [3, 3])):
        run.tree.update_(torch.tensor(parents))
        layers = run.inputs()
        run.manager.materialise()
        pool = run.manager.request.pools[0].clone()
        given = layers[0]
        want, _ = verify(
            given["q"], given["k"], given["v"], gates=given["gates"], state=pool, slots=run.slots, tree=run.tree
        )
        assert_close("output", run.play(layers, ends)[0], want, 1e-6)
