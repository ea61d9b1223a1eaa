"""Offsets and strides that would lead a kernel out of its buffers."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from bole_runtime import Factors, PendingChain, TreeBatch, commit, verify

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]

D = 16


def ready(*lead: int, heads: int = 1) -> dict[str, torch.Tensor]:
    return {"g": -torch.rand(*lead, heads), "beta": torch.rand(*lead, heads)}


def call(tree: TreeBatch, **change: Any) -> tuple[torch.Tensor, Factors]:
    given = {
        "q": torch.randn(*tree.lead, 1, D),
        "k": torch.randn(*tree.lead, 1, D),
        "v": torch.randn(*tree.lead, 1, D),
        "gates": ready(*tree.lead),
        "state": torch.randn(4, 1, D, D),
        "slots": torch.arange(tree.max_batch),
        **change,
    }
    return verify(given.pop("q"), given.pop("k"), given.pop("v"), tree=tree, validate=False, **given)


@pytest.mark.parametrize("offsets", [[0, 2, 50], [0, 40, 44], [-40, 2, 4], [30, 34, 38], [0, 4, -20]])
def test_offsets_of_an_invalid_tree_stay_in_the_buffers(offsets: list[int]) -> None:
    tree = TreeBatch.from_packed(torch.tensor([-1, 0, -1, 0]), torch.tensor(offsets), 48, validate=False)
    assert int(tree.status) & 4
    assert tree.offsets is not None
    assert 0 <= int(tree.offsets.min()) <= int(tree.offsets.max()) <= 4
    buffer = torch.full((100, 1, D), 7.0)
    call(tree, out=buffer[48:52])
    assert bool((buffer[:48] == 7).all())
    assert bool((buffer[52:] == 7).all())


@pytest.mark.parametrize("start", [-3, -(2**31), 2**31 - 1])
def test_a_ring_with_a_wrong_start_stays_in_the_ring(start: int) -> None:
    tree = TreeBatch.chain(1, 3)
    around = torch.full((6, 4, 1, D), float("nan"))
    ring = around[1:5]
    ring.fill_(1.0)
    index = torch.full((4,), 3, dtype=torch.int32)
    begin = torch.full((4,), start, dtype=torch.int32)
    pending = PendingChain(ring, torch.randn(4, 4, 1, D), ready(4, 4), index, begin)
    wrong, factors = call(tree, pending=pending, slots=torch.tensor([0]))
    assert bool(torch.isfinite(wrong).all())
    pool = torch.randn(4, 1, D, D)
    commit(pool, torch.tensor([0]), factors, torch.tensor([2]), validate=False)
    assert bool(torch.isfinite(pool).all())


def test_a_pool_without_slots() -> None:
    tree = TreeBatch.chain(1, 3)
    none = PendingChain(
        torch.empty(0, 4, 1, D),
        torch.empty(0, 4, 1, D),
        ready(0, 4),
        torch.empty(0, dtype=torch.int32),
        torch.empty(0, dtype=torch.int32),
    )
    out, _ = call(tree, pending=none, state=torch.empty(0, 1, D, D), slots=torch.tensor([-1]))
    assert bool((out == 0).all())


def far(shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    # Memory that is never touched is never there.
    return torch.empty(2**31 + 4096, dtype=torch.float16).as_strided(shape, strides)


def test_rows_beyond_32_bits_are_refused() -> None:
    tree = TreeBatch.chain(1, 5)
    near = torch.randn(1, 5, 1, D).half()
    with pytest.raises(ValueError, match=r"q: 5 rows at a stride of 536870912 elements .*q\.contiguous\(\)"):
        call(tree, q=far((1, 5, 1, D), (0, 2**29, D, 1)), k=near, v=near)
    with pytest.raises(ValueError, match="state: 16 rows at a stride of 143165577"):
        call(tree, q=near, k=near, v=near, state=far((1, 1, D, D), (0, 0, 143165577, 1)))


def test_layers_of_different_heads_are_launched_apart() -> None:
    """Views of one buffer have the same strides whatever their number of heads."""
    tree = TreeBatch.chain(1, 3)
    k, v, gates = torch.randn(1, 3, 8, D), torch.randn(1, 3, 8, D), ready(1, 3, heads=8)
    pool, slots, accepted = torch.randn(3, 8, D, D), torch.tensor([1]), torch.tensor([2])
    pools, factors = [], []
    for heads in (slice(0, 4), slice(4, 7)):
        made = Factors.allocate(tree, key_heads=1, value_heads=1, dk=D, dv=D, dtype=torch.float32)
        factors.append(
            made.replace(k=k[:, :, heads], v=v[:, :, heads], gates={n: g[..., heads] for n, g in gates.items()})
        )
        pools.append(pool[:, heads])
    want = [p.clone() for p in pools]
    for one, part in zip(want, factors, strict=True):
        commit(one, slots, part, accepted)
    commit(pools, slots, factors, accepted)
    assert all(torch.equal(p, w) for p, w in zip(pools, want, strict=True))


def test_layer_tables_of_captured_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    # The package exports the function under the name of the module.
    module = importlib.import_module("bole_runtime.backends.triton_backend.commit")

    cpu = torch.device("cpu")
    monkeypatch.setattr(module, "_captured", {})
    module._made_table.cache_clear()
    first = module._layer_table((0,), cpu)
    monkeypatch.setattr(module, "_capturing", lambda device: True)
    assert module._layer_table((0,), cpu) is first
    with pytest.raises(RuntimeError, match="have not been committed together before"):
        module._layer_table((1,), cpu)
    monkeypatch.setattr(module, "_capturing", lambda device: False)
    for n in range(1, 400):
        module._layer_table((n,), cpu)
    assert list(module._captured.values()) == [first]
    module._made_table.cache_clear()
