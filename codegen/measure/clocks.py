"""Read clocks, temperature and power. Reads only: nothing here changes a setting."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Clocks:
    """One reading.

    Attributes:
        sm_mhz: clock of the multiprocessors.
        memory_mhz: memory clock.
        temperature_c: GPU temperature.
        power_w: power draw.
        driver: driver version.
        source: ``nvml`` or ``nvidia-smi``.
    """

    sm_mhz: int
    memory_mhz: int
    temperature_c: int
    power_w: float
    driver: str
    source: str


def _from_nvml(index: int) -> Clocks | None:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except Exception:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        driver = nvml.nvmlSystemGetDriverVersion()
        return Clocks(
            sm_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            memory_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            temperature_c=int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            power_w=float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1e3,
            driver=driver.decode() if isinstance(driver, bytes) else str(driver),
            source="nvml",
        )
    except Exception:
        return None
    finally:
        nvml.nvmlShutdown()


def parse_smi(line: str) -> Clocks | None:
    """Parse one line of ``nvidia-smi --format=csv,noheader,nounits``, or return None where a field is not a number."""
    fields = [f.strip() for f in line.split(",")]
    if len(fields) != 5:
        return None
    try:
        return Clocks(int(fields[0]), int(fields[1]), int(fields[2]), float(fields[3]), fields[4], source="nvidia-smi")
    except ValueError:
        return None


def _from_smi(index: int) -> Clocks | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = "--query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw,driver_version"
    try:
        done = subprocess.run(
            [tool, f"--id={index}", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    return parse_smi(lines[0]) if lines else None


def read_clocks(index: int = 0) -> Clocks | None:
    """Read the clocks of GPU ``index`` (NVML's numbering) through pynvml or nvidia-smi; None where neither answers."""
    return _from_nvml(index) or _from_smi(index)
