"""Random operations on a StateManager on a GPU, compared with the float64 recurrence after each."""

from __future__ import annotations

import os
from typing import Any

import pytest
from bole_testing.serving import Server

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:bole")]

POLICIES: dict[str, dict[str, Any]] = {
    "eager": {"policy": "eager"},
    "fused": {"policy": "fused"},
    "deferred": {"policy": "deferred", "pending": 16},
    "deferred, early flush": {"policy": "deferred", "pending": 24, "flush_at": 9},
}


def run(name: str, steps: int, part: int = 0) -> None:
    seed = int(os.environ["BOLE_SEED"]) + part
    server = Server(seed, device="cuda", state_bound=3e-6, **POLICIES[name])
    for n in range(steps):
        try:
            server.step()
        except Exception as error:
            raise AssertionError(f"step {n} of BOLE_SEED={seed} (part 0), policy {name}: {error}") from error


@pytest.mark.parametrize("name", POLICIES)
def test_random_operations(name: str) -> None:
    run(name, 60)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(4))  # apart, so that processes share them
@pytest.mark.parametrize("name", POLICIES)
def test_thousands_of_random_operations(name: str, part: int) -> None:
    run(name, 750, part)
