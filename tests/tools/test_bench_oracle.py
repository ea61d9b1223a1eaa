"""The benchmark's oracle against the library's sequential reference, which is written differently."""

from __future__ import annotations

import pytest
import torch
from verify_bench import oracle

from bole_codegen.measure import make_verify_inputs, relative_error
from bole_runtime.factors import Factors
from bole_runtime.families import KERNEL_FAMILIES, get_family
from bole_runtime.kernels.problem import Problem
from bole_runtime.reference import commit_sequential, verify_sequential
from bole_runtime.tree import TreeBatch


def draw(gates: str, shape: str, state: str = "fp32"):
    problem = Problem("verify", "gdn", 16, 8, 2, "bf16", state, gates, "fast", 16, 8, 0, 8)
    return make_verify_inputs(problem, 2, 4, 5, 11, shape, layers=2, seed=3, device="cpu")


@pytest.mark.parametrize("gates", ["raw", "ready"])
@pytest.mark.parametrize(
    ("shape", "state"), [("ragged", "fp32"), ("chain", "bf16"), ("star", "fp16"), ("2,2,2", "fp32")]
)
def test_verify_agrees_with_the_reference(gates: str, shape: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(gates, shape, state)
    layer = inputs.layers[1]
    # Two requests a chunk, so that a ragged last chunk is covered.
    monkeypatch.setattr(oracle, "CHUNK_BYTES", 2 * 13 * 4 * 16 * 8 * 8)
    want = verify_sequential(
        layer.q, layer.k, layer.v, gates=layer.gates(gates), state=layer.state, slots=inputs.slots,
        tree=TreeBatch.from_parents(inputs.parents),
    )  # fmt: skip
    assert relative_error(oracle.verify_outputs(inputs, 1), want) < 1e-12


@pytest.mark.parametrize("family", KERNEL_FAMILIES)
@pytest.mark.parametrize("gates", ["raw", "ready"])
def test_every_family_agrees_with_the_reference(family: str, gates: str) -> None:
    spec = get_family(family)
    if gates not in spec.modes:
        pytest.skip(f"{family} has no {gates} gates")
    problem = Problem("verify", family, 16, 8, 2, "bf16", "fp32", gates, "fast", 16, 8, 0, 8)
    inputs = make_verify_inputs(problem, 2, 4, 3, 9, "ragged", layers=1, seed=5, device="cpu")
    layer, tree = inputs.layers[0], TreeBatch.from_parents(inputs.parents)
    want = verify_sequential(
        layer.q, layer.k, layer.v, gates=layer.gates(gates), state=layer.state, slots=inputs.slots, tree=tree,
        recurrence=family,
    )  # fmt: skip
    assert relative_error(oracle.verify_outputs(inputs, 0), want) < 1e-12
    accepted = oracle.accepted_nodes(inputs, 3)
    options = {i.name: i.default or 0.0 for i in spec.options(gates) if i.name != "beta_scale"}
    factors = Factors(
        spec, gates, layer.k, layer.v, dict(layer.gates(gates)), 1.0, spec.qk_l2norm, tree, options=options
    )
    states = commit_sequential(layer.state, inputs.slots, factors, accepted)
    assert relative_error(oracle.committed_states(inputs, 0, accepted), states) < 1e-12


@pytest.mark.parametrize("count", [1, 2, 4, 50])
def test_commit_agrees_with_the_reference(count: int) -> None:
    inputs = draw("raw", "ragged")
    layer = inputs.layers[0]
    accepted = oracle.accepted_nodes(inputs, count)
    counts = oracle.accepted_counts(inputs, accepted)
    assert max(counts) == min(count, inputs.depth + 1)
    tree = TreeBatch.from_parents(inputs.parents)
    factors = Factors(get_family("gdn"), "raw", layer.k, layer.v, dict(layer.raw), 1.0, True, tree)
    want = commit_sequential(layer.state, inputs.slots, factors, accepted)
    assert relative_error(oracle.committed_states(inputs, 0, accepted), want) < 1e-12


def test_rows_that_accept_nothing_keep_their_state() -> None:
    inputs = draw("ready", "chain")
    accepted = torch.tensor([-1, 2, -1, 0, 10], dtype=torch.int32)
    assert oracle.accepted_counts(inputs, accepted) == [0, 3, 0, 1, 11]
    out = oracle.committed_states(inputs, 0, accepted)
    before = inputs.layers[0].state[inputs.slots.long()].double()
    assert torch.equal(out[0], before[0])
    assert torch.equal(out[2], before[2])
    assert not torch.equal(out[1], before[1])
