"""The tool that measures commits on the hardest keys, on a CPU, where every row is the torch backend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "commit_near_keys.py"


def test_errors_are_small_and_right_on_a_cpu() -> None:
    command = [sys.executable, str(TOOL), "--device", "cpu", "--tokens", "5"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert len(rows) == 16
    for row in rows:
        # The torch backend computes in float64 here; the recurrence in fp32 does not.
        assert all(0 < float(e) < 1e-6 for e in row[5:])
        assert float(row[4]) > 1e-8
