"""Which kernels a manager takes, by the shipped tables of an H200: a pinned one is that of any capacity of a round."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from bole_runtime import Config, Factors, LayerGeometry, TreeBatch, gpus
from bole_runtime.backends.triton_backend import select
from bole_runtime.calls import CommitCall, CommitLayer
from bole_runtime.kernels.loader import LoadedKernel
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.state import StateManager, kernels
from bole_runtime.state.config import state_config
from bole_runtime.state.kernels import KernelChoice
from bole_runtime.tables.lookup import Dispatcher
from bole_runtime.tree import Capacity, CapacityBuckets

QWEN = LayerGeometry(16, 32, 128, 128, conv_width=4, gate_mode="raw")
GATES = dict.fromkeys(("a", "b", "A_log", "dt_bias"))
GRID = CapacityBuckets.grid(batches=[1, 8, 64], nodes_per_request=[4, 16], max_nodes=64)
#: The same batches, for a manager whose bits must not depend on them: trees may always be as large as its own.
PINNED = CapacityBuckets(replace(c, max_nodes=64) for c in GRID)
#: A single bound of a flat tree.
FLAT = Capacity(max_total=300, max_batch=30, max_nodes=40, max_depth=5)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose kernels as on an H200 with this package's tables, loading none."""
    record, tables = gpus.get("h200"), Dispatcher()

    def choose(
        problem: Specialisation, device: torch.device, variant: Config | None
    ) -> tuple[Config, tuple[LoadedKernel, ...]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return tables.resolve(problem, record.device_names[0], record.limits()).config, ()

    monkeypatch.setattr(select, "choose", choose)
    monkeypatch.setattr(kernels, "backend_name", lambda device: "triton")


def choice(pinned: bool, **sizes: Any) -> KernelChoice:
    given = {"slots": 64, "max_batch": 64, "max_nodes": 64, **sizes}
    return KernelChoice(state_config([QWEN], **given), torch.device("cpu"), pinned)


def chosen(made: KernelChoice, capacity: Capacity) -> tuple[Config | None, ...]:
    """Return what verification, commit and convolution of a tree take."""
    tree = capacity.tree("meta")
    slots = torch.zeros(capacity.max_batch, dtype=torch.int32, device="meta")
    factors = Factors.allocate(
        tree, key_heads=16, value_heads=32, dk=128, dv=128, dtype=torch.bfloat16, device="meta"
    )  # fmt: skip
    pool = torch.zeros(64, 32, 128, 128, device="meta")
    call = CommitCall(QWEN.spec, (CommitLayer(pool, factors),), slots, slots, tree, "lossless")
    return (
        made.of_verify(QWEN, GATES, tree, None).variant,
        made.of_commit(call),
        made.of_conv(QWEN, bias=False, silu=True, dynamic=False),
    )


@pytest.mark.parametrize("sizes", [{}, {"policy": "deferred", "pending": 16}, {"precision": "fast"}], ids=str)
def test_pinned_kernels_are_those_of_the_manager(h200: None, sizes: dict[str, Any]) -> None:
    made = choice(True, **sizes)
    whole = chosen(made, Capacity(64 * 64, 64, 64, 63))
    assert None not in whole
    for capacity in (*PINNED, FLAT):
        made.check(capacity.tree())
        assert chosen(made, capacity) == whole


def test_without_a_pin_kernels_depend_on_capacities(h200: None) -> None:
    # Else the test above would say nothing.
    made = choice(False)
    assert chosen(made, FLAT) == (None, None, None)
    trees = [c.tree("meta") for c in (*GRID, FLAT)]
    assert len({made.of_verify(QWEN, GATES, tree, None).scratch for tree in trees}) > 3


def test_trees_that_would_take_another_kernel_are_refused() -> None:
    sizes: dict[str, Any] = {"slots": 8, "max_batch": 8, "max_nodes": 60, "dtype": torch.float32}
    layer = LayerGeometry(1, 2, 8, 8)
    for invariant in (False, True):
        manager = StateManager([layer], batch_invariant=invariant, **sizes)
        for nodes in (4, 16, 32, 33, 60):
            tree, slots = TreeBatch(2, nodes), torch.tensor([-1, -1])
            if not invariant or nodes > 32:
                manager.round(tree, slots)
                continue
            message = rf"tree: max_nodes = {nodes} takes another kernel than the manager's 60, .*: 33 to 60, with any"
            with pytest.raises(ValueError, match=message):
                manager.round(tree, slots)
    small = StateManager([layer], batch_invariant=True, **{**sizes, "max_nodes": 9})
    for nodes in (1, 9):
        small.round(TreeBatch(8, nodes), torch.full((8,), -1))
