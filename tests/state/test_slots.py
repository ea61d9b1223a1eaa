"""Slots of a StateManager: given out, copied, saved, exchanged; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bole_testing.close import assert_close, assert_same_bits
from bole_testing.serving import LAYERS, Server

from bole_runtime import LayerGeometry, StateManager, TreeBatch

LAYER = LAYERS[0]
SIZES: dict[str, Any] = {"slots": 3, "max_batch": 2, "max_nodes": 4, "dtype": torch.float32}


def manager(**change: Any) -> StateManager:
    return StateManager([LAYER], **{**SIZES, **change})


def test_slots_are_reused_and_start_from_zero() -> None:
    m = manager(policy="deferred")
    slots = [m.allocate() for _ in range(3)]
    assert sorted(slots) == [0, 1, 2]
    assert m.free_slots == 0
    with pytest.raises(RuntimeError, match="all 3 slots are in use"):
        m.allocate()
    with pytest.raises(RuntimeError, match="all 3 slots are in use"):
        m.fork(0)
    m.request.pools[0].fill_(7)
    conv = m.request.conv_pools[0]
    assert conv is not None
    conv.fill_(7)
    m.request.counters.length.fill_(5)
    m.free(1)
    assert m.used_slots == {0, 2}
    assert m.allocate() == 1
    assert not m.request.pools[0][1].any()
    assert not conv[1].any()
    assert m.request.counters.length.tolist() == [5, 0, 5]
    assert bool((m.request.pools[0][[0, 2]] == 7).all())


def test_a_snapshot_outlives_its_slot_and_moves_between_managers() -> None:
    server = Server(2, policy="deferred", pending=16, max_batch=2)
    for _ in range(3):
        server.allocate()
    for _ in range(8):
        server.round()
    slot = server.slot()
    whole = server.manager.snapshot(slot, materialise=False)
    plain = server.manager.snapshot(slot, device="cpu")
    exact = [t[slot].clone() for t in server.oracle.states]
    assert whole.nbytes > plain.nbytes
    server.manager.free(slot)
    other = Server(3, policy="eager", max_batch=2).manager
    target = other.allocate()
    other.restore(target, plain)
    for n, want in enumerate(exact):
        assert_close(f"layer {n}", other.request.pools[n][target], want, 2e-6)
    with pytest.raises(ValueError, match="snapshot: of a manager with pending = 16, this one has 0"):
        other.restore(target, whole)
    stranger = manager()
    with pytest.raises(ValueError, match="snapshot: of a manager with layers"):
        stranger.restore(stranger.allocate(), plain)
    back = server.manager.allocate()
    server.manager.restore(back, whole)
    server.oracle.load(back, [*exact, *(c[slot] for c in server.oracle.convs if c is not None)])
    server.check()


def test_states_are_exchanged_in_both_layouts() -> None:
    m = StateManager([LayerGeometry(1, 2, 4, 6)], **SIZES)
    a, b = m.allocate(), m.allocate()
    m.request.pools[0].copy_(torch.randn(3, 2, 6, 4))
    (exported,) = m.export_states(a)
    assert exported.shape == (2, 4, 6)
    assert exported.is_contiguous()
    assert_same_bits("transposed", exported, m.request.pools[0][a].mT.contiguous())
    m.import_states(b, [exported])
    assert_same_bits("copied", m.request.pools[0][b], m.request.pools[0][a])
    (same,) = m.export_states(a, "dv_dk")
    assert_same_bits("as it lies", same, m.request.pools[0][a])
    m.import_states(b, [same * 2], layout="dv_dk")
    assert_same_bits("another", m.request.pools[0][b], 2 * m.request.pools[0][a])


def test_an_import_drops_the_chain() -> None:
    server = Server(4, policy="deferred", layers=(LAYER,))
    for _ in range(4):
        server.allocate()
    for _ in range(3):
        server.round()
    m = server.manager
    slot = max(m.used_slots, key=lambda s: int(m.request.counters.length[s]))
    assert int(m.request.counters.length[slot]) > 0
    state = torch.randn(2, 8, 8)
    m.import_states(slot, [state], [torch.ones(LAYER.channels, 3)])
    m.materialise([slot])
    assert_same_bits("imported", m.request.pools[0][slot], state.mT.contiguous())


def test_an_abandoned_round_changes_nothing() -> None:
    for policy in ("eager", "fused", "deferred"):
        server = Server(6, policy=policy)
        for _ in range(4):
            server.allocate()
        for _ in range(4):
            server.round()
            server.abandon()
            server.check()
        assert server.manager.current is None


def test_an_error_in_a_round_leaves_it_to_be_repeated() -> None:
    # Under the fused policy the failing call has written the layer's waiting tokens already: never twice.
    server = Server(8, policy="fused", layers=(LAYER,))
    for _ in range(4):
        server.allocate()
    server.round()
    made = server.rounds[0]
    for _ in range(2):
        with pytest.raises(TypeError, match="q: expected"):
            made.verify(0, None, None, None, gates={"g": torch.zeros(1), "beta": torch.zeros(1)})  # type: ignore[arg-type]
    made.abandon()
    server.check()
    server.round()
    server.check()


def call(m: StateManager, name: str, *arguments: Any, **options: Any) -> None:
    getattr(m, name)(*arguments, **options)


REFUSED: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("free", (1,), ValueError, "slot: 1 is not in use; slots 0 to 2 are given out by allocate"),
    ("free", (-1,), ValueError, "slot: -1 is not in use"),
    ("free", ("0",), TypeError, "slot: expected an int, got str"),
    ("free", (True,), TypeError, "slot: expected an int, got bool"),
    ("fork", (2,), ValueError, "slot: 2 is not in use"),
    ("copy", (0, 2), ValueError, "source: 2 is not in use"),
    ("copy", (2, 0), ValueError, "target: 2 is not in use"),
    ("snapshot", (2,), ValueError, "slot: 2 is not in use"),
    ("restore", (0, "x"), TypeError, "snapshot: expected a Snapshot, got str"),
    ("materialise", ([0, 2],), ValueError, "slots: 2 is not in use"),
    ("export_states", (0, "kv"), ValueError, "layout: 'kv' is not allowed; allowed: dk_dv, dv_dk"),
    ("import_states", (0, torch.zeros(2)), TypeError, "states: expected a list or tuple with one a layer, got Tensor"),
    ("import_states", (0, []), ValueError, "states: 0 for 1 layers"),
    ("import_states", (0, [torch.zeros(2, 8, 7)]), ValueError, r"states\[0\]: expected shape \(2, 8, 8\)"),
    ("import_states", (0, [torch.zeros(2, 8, 8)], [None]), ValueError, r"conv_states\[0\]: expected a tensor"),
    ("import_states", (0, [torch.zeros(2, 8, 8, device="meta")]), ValueError, r"states\[0\]: on the meta device"),
    ("round", (3, torch.zeros(2)), TypeError, "tree: expected a TreeBatch, got int"),
    ("round", (TreeBatch(3, 4), torch.zeros(3)), ValueError, "tree: max_batch = 3 is above the manager's 2"),
    ("round", (TreeBatch(2, 5), torch.zeros(2)), ValueError, "tree: max_nodes = 5 is above the manager's 4"),
    ("round", (TreeBatch(2, 4, max_total=9), torch.zeros(2)), ValueError, "tree: max_total = 9 is above"),
    ("round", (TreeBatch(2, 4), torch.zeros(2)), TypeError, r"slots: dtype torch\.float32"),
    ("round", (TreeBatch(2, 4), torch.zeros(4).int()[::2]), ValueError, "slots: must be contiguous"),
]


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"), REFUSED, ids=[f"{r[0]}-{r[3][:20]}" for r in REFUSED]
)
def test_refused(name: str, arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    m = manager()
    assert m.allocate() == 0
    with pytest.raises(error, match=message):
        call(m, name, *arguments)
    assert m.used_slots == {0}


@pytest.mark.parametrize("device", ["xyz", "meta"])
def test_a_snapshot_wants_a_device_that_holds_it(device: str) -> None:
    m = manager()
    with pytest.raises(ValueError, match=r"^device: "):
        m.snapshot(m.allocate(), device=device)


def test_rounds_refuse_what_is_out_of_order() -> None:
    m = StateManager([LAYER, LAYERS[1]], **SIZES)
    slots = torch.tensor([m.allocate(), m.allocate()])
    rnd = m.round(TreeBatch.chain(2, 4), slots)
    gates = {"g": torch.zeros(2, 4, 2), "beta": torch.ones(2, 4, 2)}

    def ask(n: int, heads: int, dk: int) -> None:
        rnd.verify(n, torch.ones(2, 4, heads, dk), torch.ones(2, 4, heads, dk), torch.ones(2, 4, 2, 8), gates=gates)

    accepted = torch.tensor([0, 0])
    with pytest.raises(TypeError, match="gates: expected a mapping from gate names to tensors, got NoneType"):
        rnd.verify(0, *[torch.ones(1)] * 3, gates=None)  # type: ignore[arg-type]
    for bad, error in ((2, ValueError), (-1, ValueError), ("0", TypeError), (True, TypeError)):
        with pytest.raises(error, match="layer: "):
            rnd.verify(bad, *[torch.ones(1)] * 3, gates=gates)  # type: ignore[arg-type]
    ask(0, 1, 8)
    with pytest.raises(ValueError, match="layer: 0 was verified in this round already"):
        ask(0, 1, 8)
    with pytest.raises(ValueError, match=r"layers \[1\] were not verified in this round"):
        rnd.commit(accepted)
    for name, arguments in (("allocate", ()), ("free", (0,)), ("fork", (0,)), ("materialise", ()), ("snapshot", (0,))):
        with pytest.raises(RuntimeError, match="a round was begun and neither committed nor abandoned"):
            call(m, name, *arguments)
    other = m.round(TreeBatch.chain(2, 4), slots)
    with pytest.raises(ValueError, match="another round of this manager was begun"):
        other.verify(0, *[torch.ones(2, 4, 1, 8)] * 2, torch.ones(2, 4, 2, 8), gates=gates)
    other.abandon()
    assert m.current is rnd
    ask(1, 2, 16)
    with pytest.raises(ValueError, match=r"layers \[0\] were not convolved in this round; .* conv_width = 0"):
        rnd.commit(accepted)
    rnd.conv(0, torch.ones(2, 4, LAYER.channels), torch.ones(LAYER.channels, 4))
    with pytest.raises(ValueError, match="layer: 1 was declared without a convolution"):
        rnd.conv(1, torch.ones(2, 4, 8), torch.ones(8, 4))
    before = [t.clone() for t in m.request.pools]
    for bad, message in (
        (torch.tensor([4, 0]), r"accepted\[0\] = 4 is outside"),
        (torch.tensor([0]), r"accepted: expected shape \(2,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            rnd.commit(bad)
    slots[1] = 2
    with pytest.raises(ValueError, match=r"slots: \[2\] are not in use"):
        rnd.commit(accepted)
    slots[1] = slots[0]
    with pytest.raises(ValueError, match="both commit to slot"):
        rnd.commit(accepted)
    for old, new in zip(before, m.request.pools, strict=True):
        assert_same_bits("nothing was written", new, old)
    slots[1] = 1
    rnd.commit(accepted)
    assert m.current is None


CONFIGS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"policy": "lazy"}, ValueError, "policy: 'lazy' is not allowed; allowed: eager, fused, deferred"),
    ({"precision": "exact"}, ValueError, "precision: 'exact' is not allowed"),
    ({"slots": 0}, ValueError, "slots: 0 is not allowed"),
    ({"max_batch": 4}, ValueError, "max_batch: 4 is not allowed; allowed: 1 to 3"),
    ({"max_nodes": 513}, ValueError, "max_nodes: 513 is not allowed; allowed: 1 to 512"),
    ({"max_depth": 4}, ValueError, "max_depth: 4 is not allowed; allowed: 0 to 3"),
    ({"max_total": 0}, ValueError, "max_total: 0 is not allowed"),
    ({"pending": 8}, ValueError, "the eager policy keeps no pending chain"),
    ({"policy": "deferred", "pending": 65}, ValueError, "pending: 65 is not allowed; allowed: 1 to 64"),
    ({"policy": "deferred", "flush_at": 33}, ValueError, "flush_at: 33 is not allowed; allowed: 0 to 32"),
    ({"dtype": torch.int32}, TypeError, r"dtype: torch\.int32 is not allowed"),
    ({"state_dtype": "fp32"}, TypeError, "state_dtype: 'fp32' is not allowed"),
    ({"pools": []}, ValueError, "pools: 0 for 1 layers"),
    ({"pools": [torch.zeros(3, 2, 8, 9)]}, ValueError, r"pools\[0\]: expected shape \(3, 2, 8, 8\)"),
    ({"pools": [torch.zeros(2, 2, 8, 8)]}, ValueError, r"pools\[0\]: 2 slots of torch\.float32, expected 3"),
    ({"conv_pools": [None]}, ValueError, r"conv_pools\[0\]: expected \(3, 32, 3\), got None"),
]


@pytest.mark.parametrize(("change", "error", "message"), CONFIGS, ids=[c[2][:30] for c in CONFIGS])
def test_configs_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        manager(**change)


def test_layers_refused() -> None:
    for layers, error, message in (
        ([], ValueError, "layers: there must be at least one"),
        (LAYER, TypeError, "layers: expected a list or tuple of LayerGeometry, got LayerGeometry"),
        ([3], TypeError, r"layers\[0\]: expected a LayerGeometry, got int"),
    ):
        with pytest.raises(error, match=message):
            StateManager(layers, **SIZES)  # type: ignore[arg-type]
    for arguments, error, message in (
        ((2, 3, 8, 8), ValueError, "value_heads: 3 is not a multiple of key_heads = 2"),
        ((0, 3, 8, 8), ValueError, "key_heads: 0 is not allowed"),
        ((1, 2, 8.0, 8), TypeError, "dk: expected an int, got float"),
        ((1, 2, 8, 8, "gdn", "cooked"), ValueError, "gate_mode: 'cooked' is not allowed"),
        ((1, 2, 8, 8, "gdn", "raw", 9), ValueError, "conv_width: 9 is not allowed"),
        ((1, 2, 8, 8, "gdn", "raw", 0, 3), ValueError, "conv_channels: 3 is not allowed with conv_width = 0"),
    ):
        with pytest.raises(error, match=message):
            LayerGeometry(*arguments)  # type: ignore[arg-type]


def test_a_slot_takes_the_states_of_another_as_views() -> None:
    m = manager()
    slot = m.allocate()
    (pool,) = m.request.pools
    pool.copy_(torch.arange(pool.numel()).view_as(pool))
    want = pool[slot].clone()
    m.import_states(slot, [pool[slot]], layout="dk_dv")  # read as [dk, dv]: transposed in place
    assert_same_bits("transposed", pool[slot], want.transpose(-1, -2))


def test_what_is_made_under_inference_mode_lives_on() -> None:
    with torch.inference_mode():
        m, tree = manager(), TreeBatch(2, 4)
        m.allocate()
        rnd = m.round(tree, torch.tensor([0, -1], dtype=torch.int32))
    tree.update_(torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]]))
    kept = m.buffers._layers[0]
    made = [tree.parents, tree.status, *m.request.pools, *(t for t in kept if isinstance(t, torch.Tensor)), rnd.actions]
    assert not any(t.is_inference() for t in made)
