"""Two GPUs of a machine, of which CUDA shows the second one alone, as NVML and nvidia-smi tell of them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bole_codegen.measure import clocks

#: What torch tells of the only device it sees: the second of the machine.
PROPERTIES = SimpleNamespace(uuid="0000-2", pci_domain_id=0, pci_bus_id=0x9B, pci_device_id=0)
SECOND = ("GPU-0000-2", "00000000:9B:00.0")


@dataclass
class Machine:
    """What the driver knows; tests change it as they go.

    Attributes:
        sm: clock of the multiprocessors of each GPU.
        temperature: of each GPU.
        processes: (pid, name, MiB) on each GPU.
        asked: addresses in the order asked for, with the tool.
        slices: whether the UUID that CUDA tells is a slice's, which NVML does not find among GPUs.
    """

    sm: list[int] = field(default_factory=lambda: [345, 1980])
    temperature: list[int] = field(default_factory=lambda: [30, 50])
    processes: list[list[tuple[int, str, int]]] = field(default_factory=lambda: [[], []])
    asked: list[tuple[str, str]] = field(default_factory=list)
    slices: bool = False

    def place(self, tool: str, address: str) -> int:
        """Return the number of a GPU in the order of the machine.

        Raises:
            LookupError: there is none of that address.
        """
        self.asked.append((tool, address))
        known = {"00000000:65:00.0": 0, SECOND[1]: 1}
        if not self.slices:
            known.update({"GPU-0000-1": 0, SECOND[0]: 1})
        if address not in known:
            raise LookupError(address)
        return known[address]

    def nvml(self) -> ModuleType:
        """Return a module that stands for NVML's binding."""
        module: Any = ModuleType("pynvml")
        module.NVML_CLOCK_SM, module.NVML_CLOCK_MEM, module.NVML_TEMPERATURE_GPU = 1, 2, 0
        module.nvmlInit = lambda: None
        module.nvmlSystemGetDriverVersion = lambda: b"580.1"
        module.nvmlDeviceGetHandleByUUID = lambda a: self.place("nvml", a)
        module.nvmlDeviceGetHandleByPciBusId = lambda a: self.place("nvml", a)
        module.nvmlDeviceGetClockInfo = lambda h, kind: self.sm[h] if kind == 1 else 3201
        module.nvmlDeviceGetTemperature = lambda h, kind: self.temperature[h]
        module.nvmlDeviceGetPowerUsage = lambda h: 120_400
        module.nvmlDeviceGetComputeRunningProcesses = lambda h: [
            SimpleNamespace(pid=p, usedGpuMemory=m << 20 if m else None) for p, _, m in self.processes[h]
        ]

        def name(pid: int) -> str:
            found = {p: n for every in self.processes for p, n, _ in every}[pid]
            if not found:
                raise LookupError(pid)
            return found

        module.nvmlSystemGetProcessName = name
        return module

    def smi(self, command: list[str], **options: Any) -> SimpleNamespace:
        """Stand for ``subprocess.run`` of nvidia-smi."""
        assert options["check"]
        try:
            h = self.place("smi", command[1].removeprefix("--id="))
        except LookupError as error:
            raise subprocess.CalledProcessError(6, command) from error
        if "--query-gpu=" in command[2]:
            return SimpleNamespace(stdout=f"{self.sm[h]}, 3201, {self.temperature[h]}, 120.40, 580.1\n")
        return SimpleNamespace(stdout="".join(f"{p}, {n}, {m}\n" for p, n, m in self.processes[h]))


def plug(machine: Machine, monkeypatch: pytest.MonkeyPatch, nvml: bool = True, smi: bool = True) -> None:
    """Put a machine in the place of torch's, NVML's and nvidia-smi's; either may be missing."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: [PROPERTIES][device])
    monkeypatch.setitem(sys.modules, "pynvml", machine.nvml() if nvml else None)  # None: importing it fails
    clocks._nvml.cache_clear()
    monkeypatch.setattr(clocks.shutil, "which", lambda name: "/usr/bin/nvidia-smi" if smi else None)
    monkeypatch.setattr(clocks.subprocess, "run", machine.smi)


def unplug() -> None:
    """Forget a binding that was a fake."""
    clocks._nvml.cache_clear()
