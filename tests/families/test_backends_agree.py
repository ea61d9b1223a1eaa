"""The torch and reference backends through the public calls: one layer of every family and gate mode, in float64."""

from __future__ import annotations

import pytest
import torch
from bole_testing.cases.base import NAN, Setup, dense_tree, packed_tree
from bole_testing.close import assert_close
from bole_testing.families import family_inputs, family_pending

from bole_runtime import Factors, TreeBatch, commit, set_backend, verify
from bole_runtime.families import FAMILIES, get_family

SETUP = Setup(verify, commit, torch.device("cpu"), torch.float64, torch.float64, "lossless")
ROWS = [[-1, 0, 0, 1, 2, 2], [-1, 0, -2, 1], [-1, -1, 1]]
CALLS = [(name, mode) for name in sorted(FAMILIES) for mode in FAMILIES[name].modes]


@pytest.fixture(autouse=True)
def _backend():
    yield
    set_backend(None)


def _tree(packed: bool) -> TreeBatch:
    if packed:
        return packed_tree(SETUP, ROWS)
    return dense_tree(SETUP, [row + [-2] * (6 - len(row)) for row in ROWS])


@pytest.mark.parametrize(("name", "mode"), CALLS)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_outputs_states_and_factors(name: str, mode: str, packed: bool) -> None:
    spec, tree = get_family(name), _tree(packed)
    inputs = family_inputs(SETUP, spec, tree, mode=mode, slots=[2, -1, 0], pool_slots=4)
    gates = {n: t.double() if isinstance(t, torch.Tensor) else t for n, t in inputs.gates.items()}
    pending = family_pending(SETUP, spec, mode, inputs, 4, [3, 0, 4, 1], [2, 0, 3, 1])
    arguments = {**inputs.arguments, "gates": gates, "pending": pending}
    outs, pools, kept = [], [], []
    for backend in ("torch", "reference"):
        set_backend(backend)
        buffers = Factors.allocate(
            tree, key_heads=2, value_heads=4, dk=24, dv=20, dtype=torch.float64, recurrence=spec, gate_mode=mode
        )
        for t in (buffers.k, buffers.v, *buffers.gates.values()):
            t.fill_(NAN)
        out = torch.full_like(inputs.v, NAN)
        got, factors = verify(inputs.q, inputs.k, inputs.v, **arguments, out=out, factors=buffers)
        assert got is out
        pool = inputs.state.clone()
        commit(pool, inputs.slots, factors, torch.tensor([5, 1, -1]))
        outs.append(out)
        pools.append(pool)
        kept.append(factors)
    live = tree.depths >= 0
    if not packed:
        live = live & (inputs.slots >= 0).unsqueeze(1)
    else:
        live[6:10] = False  # the rows of the padding slot
    assert_close("output", outs[0][live], outs[1][live], 1e-12)
    assert_close("state", pools[0][2], pools[1][2], 1e-12)
    for pool in pools:
        assert torch.equal(pool[[0, 1, 3]].view(torch.uint8), inputs.state[[0, 1, 3]].view(torch.uint8))
    assert kept[0].gate_mode == kept[1].gate_mode == spec.kept_mode(mode)
    for gate in spec.node_gates(kept[0].gate_mode):
        assert_close(gate.name, kept[0].gates[gate.name][live], kept[1].gates[gate.name][live], 1e-14)
