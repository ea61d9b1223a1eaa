"""Random forests of every family on the torch backend against its own sequential float64 recurrence."""

from __future__ import annotations

import random

import pytest
import torch
from bole_testing.cases.base import Setup, dense_tree, random_parents
from bole_testing.cases.draws import Draw, draws
from bole_testing.close import assert_close, relative_norm
from bole_testing.families import family_inputs, run_family_draw
from hypothesis import given, settings

from bole_runtime import commit, set_backend, verify
from bole_runtime.families import FAMILIES
from bole_runtime.reference import commit_sequential

HEADS = ((2, 4), (1, 3), (3, 3), (1, 1))
DIMS = ((16, 16), (24, 20), (20, 36))


@pytest.fixture(autouse=True)
def _torch_backend():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    set_backend("torch")
    yield
    set_backend(None)
    torch.set_num_threads(threads)


class _Exact(Setup):
    """Bounds of float64; verify is asked for a float64 output."""

    output_bound = state_bound = 1e-12  # type: ignore[assignment]


def _setup(in_dtype: torch.dtype, state_dtype: torch.dtype) -> Setup:
    return Setup(verify, commit, torch.device("cpu"), in_dtype, state_dtype, "lossless")


@pytest.mark.parametrize("name", sorted(FAMILIES))
@given(draw=draws(max_nodes=24, heads=HEADS, dims=DIMS))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_fp32(name: str, draw: Draw) -> None:
    run_family_draw(_setup(torch.float32, torch.float32), name, draw)


@pytest.mark.parametrize("name", sorted(FAMILIES))
@given(draw=draws(max_nodes=12, max_batch=2, heads=HEADS, dims=DIMS))
@settings(max_examples=6, deadline=None, derandomize=True)
def test_bf16_inputs_and_state(name: str, draw: Draw) -> None:
    run_family_draw(_setup(torch.bfloat16, torch.bfloat16), name, draw)


@pytest.mark.parametrize("name", sorted(FAMILIES))
@given(draw=draws(max_nodes=12, max_batch=2, heads=HEADS, dims=DIMS))
@settings(max_examples=5, deadline=None, derandomize=True)
def test_float64_stays_float64(name: str, draw: Draw) -> None:
    run_family_draw(_Exact(verify, commit, torch.device("cpu"), torch.float64, torch.float64, "lossless"), name, draw)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_rounds_do_not_drift(name: str) -> None:
    # 32 rounds of random trees: no further from float64 than twice the fp32 sequential recurrence.
    setup, spec, rng = _setup(torch.float32, torch.float32), FAMILIES[name], random.Random(0)
    pool = torch.randn(1, 2, 8, 12, generator=torch.Generator().manual_seed(0))
    exact, single = pool.double(), pool.clone()
    slots = torch.tensor([0])
    for seed in range(32):
        tree = dense_tree(setup, [random_parents(rng, 6)])
        inputs = family_inputs(
            setup, spec, tree, heads=(1, 2), dims=(12, 8), mode=spec.modes[-1], slots=[0], pool_slots=1, seed=seed
        )
        _, factors = verify(inputs.q, inputs.k, inputs.v, **{**inputs.arguments, "state": pool})
        accepted = torch.tensor([rng.randrange(-1, 6)])
        exact = commit_sequential(exact, slots, factors, accepted)
        single = commit_sequential(single, slots, factors, accepted, dtype=torch.float32)
        commit(pool, slots, factors, accepted)
    assert_close(name, pool, exact, max(1e-6, 2 * relative_norm(single, exact)))
