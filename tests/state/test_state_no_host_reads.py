"""A round never reads its tensors on the host: every call runs on tensors without data, where a read would raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bole_runtime import LayerGeometry, StateManager, TreeBatch, set_backend

LAYER = LayerGeometry(1, 2, 8, 8, gate_mode="raw", conv_width=4)
POLICIES: list[dict[str, Any]] = [{"policy": "eager"}, {"policy": "fused"}, {"policy": "deferred", "pending": 8}]


@pytest.fixture(autouse=True)
def _torch_backend(monkeypatch: pytest.MonkeyPatch):
    # Tensors without data all have address 0, which checks of shared memory would take for one tensor.
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda t: id(t))
    set_backend("torch")
    yield
    set_backend(None)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("sizes", POLICIES, ids=lambda s: s["policy"])
def test_rounds_and_slots(sizes: dict[str, Any]) -> None:
    packed = sizes["policy"] != "eager"
    manager = StateManager([LAYER] * 2, slots=3, max_batch=2, max_nodes=6, dtype=torch.float32, device="meta", **sizes)
    manager.allocate(), manager.allocate()
    tree = TreeBatch(2, 6, max_total=12 if packed else None, device="meta")
    rnd = manager.round(tree, empty(2, dtype=torch.int32))
    lead = tree.lead
    for _ in range(2):
        tree.update_(empty(*lead, dtype=torch.int32), empty(3, dtype=torch.int32) if packed else None)
        for n in range(2):
            rnd.conv(n, empty(*lead, LAYER.channels), empty(LAYER.channels, 4))
            gates = {"a": empty(*lead, 2), "b": empty(*lead, 2), "A_log": empty(2), "dt_bias": empty(2)}
            rnd.verify(n, empty(*lead, 1, 8), empty(*lead, 1, 8), empty(*lead, 2, 8), gates=gates)
        rnd.commit(empty(2, dtype=torch.int64))
    manager.fork(0)
    manager.materialise()
    rnd.abandon()
    manager.copy(1, 0)
    manager.restore(1, manager.snapshot(0, materialise=False))


def test_a_read_would_raise() -> None:
    with pytest.raises(Exception, match="meta"):
        empty(1).item()
    with pytest.raises(Exception, match="meta"):
        bool(empty(1).any())
