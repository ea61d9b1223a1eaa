"""Random operations on a StateManager, compared with the float64 recurrence after each. ``BOLE_SEED`` repeats a run."""

from __future__ import annotations

import os
import random

import pytest
from bole_testing.serving import Server

POLICIES = {
    "eager": {"policy": "eager"},
    "fused": {"policy": "fused"},
    "fused, short ring": {"policy": "fused", "pending": 3},
    "deferred": {"policy": "deferred", "pending": 16},
    "deferred, short ring": {"policy": "deferred", "pending": 5},
    "deferred, early flush": {"policy": "deferred", "pending": 24, "flush_at": 9},
}


def run(name: str, seed: int, steps: int) -> Server:
    server = Server(seed, **POLICIES[name])
    for n in range(steps):
        try:
            server.step()
        except Exception as error:
            raise AssertionError(f"step {n} of BOLE_SEED={seed}, policy {name}: {error}") from error
    return server


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_random_operations(name: str) -> None:
    # 3000 operations over the policies, in every run of the tests.
    server = run(name, 7, 500)
    assert server.accepted_tokens > 300
    assert server.longest_walk >= 4
    every = {"abandon", "allocate", "copy", "exchange", "fork", "free", "materialise", "restore", "round", "snapshot"}
    assert server.done.keys() == every


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", POLICIES)
def test_more_random_operations(name: str) -> None:
    seed = int(os.environ.get("BOLE_SEED") or random.randrange(2**31))
    print(f"BOLE_SEED={seed}")
    run(name, seed, 5000)
