"""The tool that docs/kernels.md takes its errors on repeated keys from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
TOOL = Path(__file__).resolve().parents[2] / "tools" / "repeated_keys.py"


def errors(*options: str) -> dict[str, float]:
    """Run the tool in a process of its own, since it sets the interpreter up before Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(TOOL), *options], capture_output=True, text=True, check=True, timeout=300
    )
    return {name: float(value) for name, value in (line.split() for line in done.stdout.splitlines())}


def test_both_profiles_keep_their_bounds_and_are_not_the_same_kernel() -> None:
    found = errors("--nodes", "16", "--beta", "1.9", "--gate", "-0.05", "--noise", "0.2")
    assert 0 < found["lossless"] < 5e-6 < found["fast"] < 3e-3
