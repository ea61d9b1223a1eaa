"""Scratch memory of a manager does not grow: it is enough for every family, with and without qk_l2norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bole_runtime import LayerGeometry, StateManager, TreeBatch, get_family
from bole_runtime.families import KERNEL_FAMILIES

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]


@pytest.mark.parametrize("invariant", [False, True], ids=["by_tree", "batch_invariant"])
@pytest.mark.parametrize("family", KERNEL_FAMILIES)
def test_no_call_takes_more_than_is_reserved(family: str, invariant: bool) -> None:
    for nodes in (12, 100):
        layer = LayerGeometry(2, 2, 16, 16, recurrence=family)
        sizes: dict[str, Any] = {"slots": 4, "max_batch": 4, "max_nodes": nodes, "dtype": torch.float32}
        manager = StateManager([layer], batch_invariant=invariant, device="cpu", **sizes)
        smaller = () if invariant else (3, 17, 33, 65)
        trees = [TreeBatch(b, n) for b in (1, 4) for n in (nodes, *smaller) if n <= nodes]
        for mode in layer.spec.modes:
            gates = dict.fromkeys(layer.spec.required[mode])
            needs = [manager.kernels.of_verify(layer, gates, t, norm).scratch for t in trees for norm in (False, True)]
            assert 4 * max(needs) <= manager.memory.scratch


@pytest.mark.parametrize("invariant", [False, True], ids=["by_tree", "batch_invariant"])
def test_rounds_against_the_default_of_the_family_do_not_grow_it(invariant: bool) -> None:
    layer = LayerGeometry(2, 2, 16, 16, recurrence="lightning")
    assert not get_family("lightning").qk_l2norm
    manager = StateManager(
        [layer], slots=1, max_batch=1, max_nodes=40, dtype=torch.float32, device="cpu", batch_invariant=invariant
    )
    before = manager.memory
    rnd = manager.round(TreeBatch.chain(1, 40), torch.tensor([manager.allocate()]))
    q, k, v = torch.randn(3, 1, 40, 2, 16).unbind()
    for norm in (True, None):
        rnd.verify(0, q, k, v, gates={"g": -torch.rand(2)}, qk_l2norm=norm)
        rnd.abandon()
    assert manager.memory == before
