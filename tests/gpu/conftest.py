"""GPU tests: kernels on a CUDA device. `python tools/precompile.py --tests` compiles theirs over all cores first."""

from __future__ import annotations

import os
import random

import pytest
from bole_testing.devices import by_device

from bole_runtime.backends.scratch import poisoned


def _seed() -> int:
    given = os.environ.get("BOLE_SEED")
    return int(given) if given else random.SystemRandom().randrange(2**31)


#: Of the random tests: fresh in every run, the same for all of its processes.
SEED = os.environ.setdefault("BOLE_SEED", str(_seed()))


def pytest_report_header() -> str:
    return f"BOLE_SEED={SEED} (random GPU tests; set it to repeat a run)"


@pytest.fixture(autouse=True)
def _backends():
    with by_device(), poisoned():
        yield
