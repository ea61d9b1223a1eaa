"""Tokens that wait in a chain are folded in as they were verified; snapshots move between pools of any kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bole_testing.close import assert_same_bits

from bole_runtime import LayerGeometry, StateManager, TreeBatch
from bole_runtime.state.round import Round

SIZES: dict[str, Any] = {"slots": 3, "max_batch": 1, "max_nodes": 4, "dtype": torch.float32}
TREE = TreeBatch.chain(1, 4)
POLICIES = ("eager", "fused", "deferred")


def manager(policy: str, layers: int = 1, **geometry: Any) -> StateManager:
    layer = LayerGeometry(key_heads=1, value_heads=2, dk=16, dv=16, **geometry)
    return StateManager([layer] * layers, policy=policy, **SIZES)


def verify(rnd: Round, seed: int, layer: int = 0, **options: Any) -> torch.Tensor:
    torch.manual_seed(seed)
    q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 4, 1, 16), torch.randn(1, 4, 2, 16)
    gates = {"g": -torch.rand(1, 4, 2), "beta": torch.rand(1, 4, 2)}
    return rnd.verify(layer, q, k, v, **{"gates": gates, **options})


def started(policy: str, **options: Any) -> tuple[StateManager, Round, int]:
    """A manager after one round in which three tokens were accepted."""
    made = manager(policy)
    slot = made.allocate()
    rnd = made.round(TREE, torch.tensor([slot]))
    verify(rnd, 3, **options)
    rnd.commit(torch.tensor([2]))
    return made, rnd, slot


@pytest.mark.parametrize("policy", ["fused", "deferred"])
def test_a_later_call_cannot_change_how_waiting_tokens_count(policy: str) -> None:
    wanted = started(policy)[0].export_states(0)[0]
    made, rnd, slot = started(policy)
    with pytest.raises(ValueError, match="layer 0: qk_l2norm = False instead of True; tokens of earlier calls"):
        verify(rnd, 4, qk_l2norm=False)
    assert made.current is None
    assert_same_bits("state", made.export_states(slot)[0], wanted)
    verify(rnd, 4)  # the round can be repeated


def test_an_eager_manager_has_nothing_that_waits() -> None:
    _, rnd, _ = started("eager")
    verify(rnd, 4, qk_l2norm=False)


@pytest.mark.parametrize("policy", ["fused", "deferred"])
def test_a_refused_call_leaves_the_parameters_of_the_calls_before_it(policy: str) -> None:
    def run(wrong: bool) -> torch.Tensor:
        made = manager(policy, recurrence="kda", gate_mode="raw")
        slot = made.allocate()
        rnd = made.round(TREE, torch.tensor([slot]))
        torch.manual_seed(3)
        q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 4, 1, 16), torch.randn(1, 4, 2, 16)
        spec = made.geometry(0).spec
        gates: dict[str, torch.Tensor] = {}
        for i in spec.gates("raw"):
            if i.role != "option":
                lead = (1, 4) if "node" in i.shape else ()
                gates[i.name] = torch.randn(*lead, *i.sizes((1, 2), (16, 16)))
        rnd.verify(0, q, k, v, gates=gates)
        rnd.commit(torch.tensor([2]))
        if wrong:
            bad = {**gates, "A_log": gates["A_log"][:1] + 1}
            with pytest.raises(ValueError, match=r"A_log'\]: expected shape"):
                rnd.verify(0, q, k, v, gates=bad)
            rnd.abandon()
        return made.export_states(slot)[0]

    assert_same_bits("state", run(wrong=True), run(wrong=False))


@pytest.mark.parametrize("policy", ["fused", "deferred"])
def test_a_kept_chain_brings_what_its_tokens_were_verified_with(policy: str) -> None:
    made, _, slot = started(policy, qk_l2norm=False)
    snapshot = made.snapshot(slot, materialise=False)
    wanted = made.export_states(slot)[0]
    fresh = manager(policy)
    target = fresh.allocate()
    fresh.restore(target, snapshot)
    assert_same_bits("state", fresh.export_states(target)[0], wanted)
    other, _, taken = started(policy)
    before = other.export_states(taken)[0]
    with pytest.raises(ValueError, match=r"snapshot: .* layer 0 .* qk_l2norm = False instead of True"):
        other.restore(taken, snapshot)
    assert_same_bits("state", other.export_states(taken)[0], before)
    other.restore(taken, made.snapshot(slot))  # states alone fit anywhere
    assert_same_bits("state", other.export_states(taken)[0], wanted)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("materialise", [True, False])
def test_snapshots_move_between_pools_of_the_manager_and_of_the_caller(policy: str, materialise: bool) -> None:
    layer = LayerGeometry(key_heads=1, value_heads=2, dk=16, dv=16, conv_width=4)
    plain = LayerGeometry(key_heads=1, value_heads=1, dk=8, dv=5)
    layers, kind = [layer, plain, layer], {"policy": policy, **SIZES}
    packed = StateManager(layers, **kind)
    pools = [torch.zeros(3, *y.state_shape) for y in layers]
    convs = [torch.zeros(3, y.channels, 3) if y.conv_width else None for y in layers]
    separate = StateManager(layers, pools=pools, conv_pools=convs, **kind)
    for source, target in ((packed, separate), (separate, packed)):
        first, second = source.allocate(), target.allocate()
        states = [torch.randn(*pool.shape[1:]) for pool in source.request.pools]
        conv_states = [None if c is None else torch.randn(*c.shape[1:]) for c in source.request.conv_pools]
        source.import_states(first, states, conv_states, layout="dv_dk")
        target.restore(second, source.snapshot(first, materialise=materialise))
        for got, want in zip(target.export_states(second, "dv_dk"), states, strict=True):
            assert_same_bits("state", got, want)
        for pool, conv in zip(target.request.conv_pools, conv_states, strict=True):
            if pool is not None and conv is not None:
                assert_same_bits("state", pool[second], conv)


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_grows_when_parameters_are_new_tensors_every_round(policy: str) -> None:
    made = manager(policy, recurrence="retention")
    slot = made.allocate()
    rnd = made.round(TREE, torch.tensor([slot]))
    name = next(i.name for i in made.geometry(0).spec.gates("ready"))
    for _ in range(5):
        verify(rnd, 1, gates={name: torch.full((2,), -0.5)})
        rnd.commit(torch.tensor([1]))
    assert not rnd._kept  # only a captured graph needs the tables of earlier commits


def test_states_with_a_gradient_leave_the_pools_without_one() -> None:
    pools = [torch.zeros(3, 2, 16, 16, requires_grad=True)]
    layer = LayerGeometry(key_heads=1, value_heads=2, dk=16, dv=16)
    for made in (StateManager([layer], **SIZES), StateManager([layer], pools=pools, **SIZES)):
        slot = made.allocate()
        made.import_states(slot, [torch.ones(2, 16, 16, requires_grad=True) * 2])
        copy = made.fork(slot)
        assert made.request.pools[0].grad_fn is None
        got = made.export_states(copy)[0]
        assert not got.requires_grad
        assert bool((got == 2).all())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"pools": torch.zeros(2, 3, 2, 16, 16)},
            TypeError,
            "pools: expected a list or tuple with one a layer, got",
        ),
        ({"pools": [torch.zeros(3, 2, 16, 16)] * 2}, ValueError, "pools: two layers share a pool"),
        (
            {"pools": [torch.zeros(1, 2, 16, 16).expand(3, -1, -1, -1), torch.zeros(3, 2, 16, 16)]},
            ValueError,
            r"pools\[0\]: expanded \(stride 0\)",
        ),
        ({"conv_pools": [torch.zeros(3, 64, 3)] * 2}, ValueError, "conv_pools: two layers share a pool"),
        (
            {"pools": [(whole := torch.zeros(5, 2, 16, 16))[:3], whole[1:4]]},
            ValueError,
            r"pools\[0\]: overlaps pools\[1\]",
        ),
        (
            {"pools": [torch.zeros(2000).as_strided((3, 2, 16, 16), (256, 256, 16, 1)), torch.zeros(3, 2, 16, 16)]},
            ValueError,
            r"pools\[0\]: overlaps itself",
        ),
        ({"conv_pools": [(convs := torch.zeros(4, 64, 3))[:3], convs[1:]]}, ValueError, r"conv_pools\[0\]: overlaps"),
        (
            {
                "pools": [(one := torch.zeros(3, 2, 16, 16)), torch.zeros(3, 2, 16, 16)],
                "conv_pools": [one.view(-1)[:576].view(3, 64, 3), torch.zeros(3, 64, 3)],
            },
            ValueError,
            r"pools\[0\]: overlaps conv_pools\[0\]",
        ),
        ({"conv_pools": [torch.zeros(3, 64, 3).to_sparse(), torch.zeros(3, 64, 3)]}, TypeError, "expected a dense"),
        ({"conv_pools": [[1], None]}, TypeError, r"conv_pools\[0\]: expected a torch.Tensor or None, got list"),
    ],
)
def test_pools_that_share_memory_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    layer = LayerGeometry(key_heads=1, value_heads=2, dk=16, dv=16, conv_width=4)
    with pytest.raises(error, match=message):
        StateManager([layer] * 2, **SIZES, **change)


@pytest.mark.parametrize(
    ("states", "convs", "message"),
    [
        ([torch.ones(2, 16, 16).to_sparse()], None, r"states\[0\]: expected a dense tensor"),
        ([torch.ones(2, 16, 16)], [torch.ones(64, 3).to_sparse()], r"conv_states\[0\]: expected a dense tensor"),
        ([torch.ones(2, 16, 16, dtype=torch.complex64)], None, r"states\[0\]: dtype torch.complex64 is not allowed"),
        ([torch.ones(2, 16, 16)], [[1]], r"conv_states\[0\]: expected a torch.Tensor, got list"),
    ],
)
def test_states_of_a_wrong_type_are_refused_before_anything_is_written(states: Any, convs: Any, message: str) -> None:
    made = manager("eager", conv_width=4)
    slot = made.allocate()
    with pytest.raises(TypeError, match=message):
        made.import_states(slot, states, convs)
    assert not made.request.pools[0].any()


@pytest.mark.parametrize("name", ["conv_width", "conv_channels"])
def test_sizes_of_a_layer_are_integers(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: expected an int, got float"):
        LayerGeometry(1, 2, 16, 16, **{"conv_width": 4, name: 4.0})  # type: ignore[arg-type]


@pytest.mark.parametrize("convolved", [False, True])
def test_a_slot_of_two_requests_does_not_get_its_waiting_tokens_twice(convolved: bool) -> None:
    layer = LayerGeometry(key_heads=1, value_heads=2, dk=16, dv=16, conv_channels=64, conv_width=4)
    made = StateManager([layer], policy="fused", **{**SIZES, "max_batch": 2})
    tree, slots = TreeBatch.chain(2, 4), torch.tensor([made.allocate(), made.allocate()])
    rnd = made.round(tree, slots)

    def verify_both() -> None:
        torch.manual_seed(5)
        q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 1, 16), torch.randn(2, 4, 2, 16)
        rnd.verify(0, q, k, v, gates={"g": -torch.rand(2, 4, 2), "beta": torch.rand(2, 4, 2)})

    def convolve() -> None:
        rnd.conv(0, torch.randn(2, 4, 64), torch.randn(64, 4))

    convolve()
    verify_both()
    rnd.commit(torch.tensor([2, 1]))
    wanted = made.export_states(made.fork(0))[0]  # a fork has the tokens that wait, too
    slots.copy_(torch.tensor([0, 0]))
    if convolved:
        convolve()  # the round has begun: what abandons it writes what waits
    with pytest.raises(ValueError, match=r"slots: \[0\] are those of several requests"):
        verify_both()
    rnd.abandon()
    torch.testing.assert_close(made.export_states(0)[0], wanted, rtol=0, atol=0)
    with pytest.raises(TypeError, match=r"slots: expected a sequence of slots, got 0; write \[0\]"):
        made.materialise(0)  # type: ignore[arg-type]
