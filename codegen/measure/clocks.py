"""Read clocks, temperature, power and processes of a GPU. Reads only: nothing here changes a setting.

CUDA counts the devices that ``CUDA_VISIBLE_DEVICES`` leaves, in an order of its own; NVML and nvidia-smi count all of
the machine. So a GPU is asked for by its UUID or its PCI bus id, never by its number.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")


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


@dataclass(frozen=True)
class GpuProcess:
    """A program that computes on a GPU.

    Attributes:
        pid: as the driver numbers it, which in a container may be another than its own.
        name: of its executable, empty where it is not told.
        mib: memory on the GPU, 0 where it is not told.
    """

    pid: int
    name: str
    mib: int


def addresses_of(properties: Any) -> tuple[str, ...]:
    """Return what NVML and nvidia-smi know a GPU by, of the properties that torch tells of it.

    A slice of a GPU (MIG) has a UUID that is no GPU's: its PCI bus id is that of the GPU it is part of.

    Args:
        properties: ``torch.cuda.get_device_properties``; older releases of torch tell less.
    """
    found = []
    uuid = str(getattr(properties, "uuid", "") or "")
    if uuid:
        found.append(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    bus = getattr(properties, "pci_bus_id", None)
    if isinstance(bus, int):
        domain, slot = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
        found.append(f"{domain:08X}:{bus:02X}:{slot:02X}.0")
    return tuple(found)


def gpu_addresses(device: int = 0) -> tuple[str, ...]:
    """Return the addresses of a CUDA device, as torch counts them; none where it has no such device."""
    try:
        import torch

        return addresses_of(torch.cuda.get_device_properties(device)) if torch.cuda.is_available() else ()
    except Exception:  # Without a driver, or with a broken one, torch raises all kinds.
        return ()


@functools.cache
def _nvml() -> Any:
    """Return NVML's binding, ready for calls for as long as this process lives; None where there is no NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    return pynvml


def _ask_nvml(addresses: Sequence[str], ask: Callable[[Any, Any], _T]) -> _T | None:
    """Call with NVML and the handle of a GPU; None where it is not found or does not answer."""
    nvml = _nvml()
    if nvml is None:
        return None
    for address in addresses:
        by = nvml.nvmlDeviceGetHandleByPciBusId if ":" in address else nvml.nvmlDeviceGetHandleByUUID
        try:
            return ask(nvml, by(address))
        except Exception:
            continue
    return None


def _ask_smi(addresses: Sequence[str], query: str) -> str | None:
    """Return what ``nvidia-smi`` says of a GPU; None where it is not found or does not answer."""
    tool = shutil.which("nvidia-smi")
    for address in addresses if tool is not None else ():
        command = [str(tool), f"--id={address}", query, "--format=csv,noheader,nounits"]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue
    return None


def _text(value: str | bytes) -> str:
    # Old bindings return bytes.
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _nvml_clocks(nvml: Any, handle: Any) -> Clocks:
    return Clocks(
        sm_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        memory_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        temperature_c=int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        power_w=float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1e3,
        driver=_text(nvml.nvmlSystemGetDriverVersion()),
        source="nvml",
    )


def _nvml_processes(nvml: Any, handle: Any) -> list[GpuProcess]:
    found = []
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        try:
            name = _text(nvml.nvmlSystemGetProcessName(process.pid))
        except Exception:  # It may be of another container, or gone.
            name = ""
        found.append(GpuProcess(int(process.pid), name, int(process.usedGpuMemory or 0) >> 20))
    return found


def parse_smi(line: str) -> Clocks | None:
    """Parse one line of ``nvidia-smi --format=csv,noheader,nounits``, or return None where a field is not a number."""
    fields = [f.strip() for f in line.split(",")]
    if len(fields) != 5:
        return None
    try:
        return Clocks(int(fields[0]), int(fields[1]), int(fields[2]), float(fields[3]), fields[4], source="nvidia-smi")
    except ValueError:
        return None


def parse_processes(text: str) -> list[GpuProcess]:
    """Parse lines ``pid, name, MiB`` of nvidia-smi; what is not a number counts as 0 MiB."""
    found = []
    for line in text.splitlines():
        fields = [f.strip() for f in line.split(",")]
        if len(fields) < 3 or not fields[0].isdigit():
            continue
        memory = fields[-1].split()[0] if fields[-1] else ""
        name = ", ".join(fields[1:-1])
        # What nvidia-smi prints for a process that it cannot see.
        name = "" if name in ("[Not Found]", "[N/A]") else name
        found.append(GpuProcess(int(fields[0]), name, int(memory) if memory.isdigit() else 0))
    return found


def clocks_at(addresses: Sequence[str]) -> Clocks | None:
    """Read the clocks of a GPU through NVML, else nvidia-smi; None where neither answers.

    Args:
        addresses: of :func:`gpu_addresses`; which GPU is asked for never depends on ``CUDA_VISIBLE_DEVICES``.
    """
    found = _ask_nvml(addresses, _nvml_clocks)
    if found is None:
        text = _ask_smi(addresses, "--query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw,driver_version")
        lines = (text or "").strip().splitlines()
        found = parse_smi(lines[0]) if lines else None
    return found


def processes_at(addresses: Sequence[str]) -> list[GpuProcess]:
    """Return the programs that compute on a GPU now, this one's own included; empty where nobody can tell."""
    found = _ask_nvml(addresses, _nvml_processes)
    if found is None:
        found = parse_processes(_ask_smi(addresses, "--query-compute-apps=pid,process_name,used_memory") or "")
    return found


def read_clocks(device: int = 0) -> Clocks | None:
    """Read the clocks of a CUDA device, as torch counts them; None where nobody can tell."""
    return clocks_at(gpu_addresses(device))
