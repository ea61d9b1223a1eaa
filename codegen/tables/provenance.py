"""With which device and software a table was made."""

from __future__ import annotations

import datetime
import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path

from bole_codegen.measure import read_clocks
from bole_runtime.gpus import GpuRecord
from bole_runtime.tables.schema import SCHEMA_VERSION, Gpu, Header

_VERSION = re.compile(r"[0-9A-Za-z.+_-]{1,64}")


def _clean(text: str) -> str:
    found = _VERSION.search(text)
    return found.group(0) if found else ""


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _installed(package: str) -> str:
    try:
        return _clean(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return ""


def ptxas_version() -> str:
    """Return the version of the ptxas that Triton calls, empty if it is not found."""
    try:
        import triton

        bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    except ImportError:
        return ""
    tool = str(bundled) if bundled.is_file() else shutil.which("ptxas")
    found = re.search(r"release [\d.]+, V([\d.]+)", _run(tool, "--version")) if tool else None
    return _clean(found.group(1)) if found else ""


def _line(text: str) -> str:
    return re.sub(r"[\x00-\x1f\x7f]+", " ", text)[:400]


def gather(record: GpuRecord, device: int = 0) -> Gpu:
    """Describe the CUDA device present and the software on it.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    import torch

    name = torch.cuda.get_device_name(device)
    now = read_clocks(device)
    clocks = ""
    if now is not None:
        clocks = f"SM {now.sm_mhz} MHz, memory {now.memory_mhz} MHz, {now.temperature_c} C when the run began"
    return Gpu(
        key=record.key,
        device_name=_line(name),
        compute_capability=torch.cuda.get_device_capability(device),
        driver=_clean(now.driver) if now else "",
        cuda=_clean(torch.version.cuda or ""),
        triton=_installed("triton"),
        torch=_installed("torch"),
        ptxas=ptxas_version(),
        clocks=_line(clocks),
    )


def predicted_gpu(record: GpuRecord) -> Gpu:
    """Describe a GPU that is not present: the record and the compiler, no driver and no clocks."""
    return Gpu(
        key=record.key,
        device_name=_line(record.device_names[0] if record.device_names else record.title),
        compute_capability=record.compute_capability or (0, 0),
        driver="",
        cuda="",
        triton=_installed("triton"),
        torch=_installed("torch"),
        ptxas=ptxas_version(),
        clocks="",
    )


def header(gpu: Gpu, family: str, protocol: str) -> Header:
    """Return the header of a table made today."""
    return Header(
        schema_version=SCHEMA_VERSION,
        family=family,
        gpu=gpu,
        protocol=_line(protocol),
        date=datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
    )
