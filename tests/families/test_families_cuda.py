"""Every family on the torch backend of a CUDA device: no host sync, and in a captured graph."""

from __future__ import annotations

import pytest
import torch
from bole_testing.cases.base import Setup, dense_tree
from bole_testing.cases.checks import check_commit, check_verify
from bole_testing.close import assert_close
from bole_testing.families import family_inputs, family_pending

from bole_runtime import commit, set_backend, verify
from bole_runtime.families import FAMILIES

pytestmark = pytest.mark.gpu
PARENTS = [[-1, 0, 0, 1, 2, 2], [-1, 0, 1, 2, -1, 4]]


@pytest.fixture(autouse=True)
def _torch_backend():
    set_backend("torch")
    yield
    set_backend(None)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_no_host_sync(name: str) -> None:
    setup = Setup(verify, commit, torch.device("cuda", 0), torch.bfloat16, torch.float32, "lossless")
    spec = FAMILIES[name]
    mode = spec.modes[-1]
    inputs = family_inputs(setup, spec, dense_tree(setup, PARENTS), mode=mode)
    pending = family_pending(setup, spec, mode, inputs, 3, [2, 0, 3, 1], [0, 1, 2, 0])
    inputs = inputs.replace(options={**inputs.options, "pending": pending})
    check_commit(setup, inputs, check_verify(setup, inputs), [4, 5])
    accepted = torch.tensor([5, -1], device=setup.device)
    pool = inputs.state.clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _, factors = verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
        commit(pool, inputs.slots, factors, accepted)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_captured_graph_reads_new_inputs(name: str) -> None:
    setup = Setup(verify, commit, torch.device("cuda", 0), torch.float32, torch.float32, "lossless")
    inputs, other = (family_inputs(setup, FAMILIES[name], dense_tree(setup, PARENTS), seed=s) for s in (0, 1))
    out = torch.empty_like(inputs.v)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        verify(inputs.q, inputs.k, inputs.v, **inputs.arguments, out=out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verify(inputs.q, inputs.k, inputs.v, **inputs.arguments, out=out)
    for own, new in ((inputs.q, other.q), (inputs.k, other.k), (inputs.v, other.v), (inputs.state, other.state)):
        own.copy_(new)
    for gate, value in other.gates.items():
        inputs.gates[gate].copy_(value)
    inputs.slots.copy_(other.slots)
    out.fill_(float("nan"))
    graph.replay()
    expected, _ = verify(other.q, other.k, other.v, **other.arguments)
    assert_close(name, out, expected, 1e-6)
