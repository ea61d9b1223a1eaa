"""Where, when and with what a benchmark ran."""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bole_codegen.measure import read_clocks

PROTOCOL = (
    "several layers with tensors of their own in one CUDA graph, states cold in L2; median of the replays divided by "
    "the layers; candidates interleaved in one run; random inputs; outputs poisoned and checked before and after"
)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def collect(seed: int, argv: list[str]) -> dict[str, Any]:
    """Return what a reader needs to judge and repeat the run. JSON-serialisable."""
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "tools/bench_verify.py", *argv]),
        "seed": seed,
        "protocol": PROTOCOL,
        "source": _commit(),
        "bole": _version("bole"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda or "none",
        "executable": Path(sys.executable).name,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        record["device"] = {
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
        }
        record["clocks_before"] = clocks()
    else:
        record["device"] = {"name": "cpu"}
    return record


def clocks() -> dict[str, Any] | None:
    """Return a reading of clocks and temperature, or None."""
    reading = read_clocks(torch.cuda.current_device()) if torch.cuda.is_available() else None
    return None if reading is None else asdict(reading)
