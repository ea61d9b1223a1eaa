"""Everything of a request goes out of one manager and into another: what is exported is what is imported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bole_testing.close import assert_same_bits
from bole_testing.serving import LAYERS, Server

from bole_runtime import StateManager


@pytest.mark.parametrize("layout", ["dk_dv", "dv_dk"])
@pytest.mark.parametrize("policy", ["eager", "deferred"])
def test_a_request_moves_to_another_manager(policy: str, layout: str) -> None:
    server = Server(6, policy=policy)
    server.allocate()
    while server.accepted_tokens < 12:
        server.round()
    source = server.manager
    slot = server.slot()
    sizes: dict[str, Any] = {"slots": 2, "max_batch": 1, "max_nodes": 4, "dtype": torch.float32}
    target = StateManager(list(LAYERS), policy="fused", **sizes)
    target.allocate()
    other = target.allocate()
    target.import_states(other, *source.export_states(slot, layout, conv=True), layout=layout)
    for pool, want in zip(target.request.pools, source.request.pools, strict=True):
        assert_same_bits("states", pool[other], want[slot])
    for conv, wanted in zip(target.request.conv_pools, source.request.conv_pools, strict=True):
        assert (conv is None) == (wanted is None)
        if conv is not None and wanted is not None:
            assert bool(wanted[slot].any())
            assert_same_bits("convolution states", conv[other], wanted[slot])


def test_what_is_exported_is_a_copy() -> None:
    manager = StateManager(list(LAYERS), slots=1, max_batch=1, max_nodes=4, dtype=torch.float32)
    slot = manager.allocate()
    states, convs = manager.export_states(slot, conv=True)
    assert [None if c is None else tuple(c.shape) for c in convs] == [(32, 3), None, (32, 3)]
    assert [tuple(s.shape) for s in states] == [(2, 8, 8), (2, 16, 8), (2, 8, 8)]
    for t in (*states, *(c for c in convs if c is not None)):
        t.fill_(1)
    held = (*manager.request.pools, *(c for c in manager.request.conv_pools if c is not None))
    assert not any(bool(t.any()) for t in held)
    assert isinstance(manager.export_states(slot), list)
