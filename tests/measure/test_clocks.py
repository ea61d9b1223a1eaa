"""Which GPU is asked for its clocks and processes, by what, and what of the answers is understood."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gpu_fakes as fakes
import pytest

from bole_codegen.measure import clocks, read_clocks
from bole_codegen.measure.clocks import GpuProcess


@pytest.fixture
def machine() -> Iterator[fakes.Machine]:
    yield fakes.Machine()
    fakes.unplug()


@pytest.mark.parametrize(("nvml", "source"), [(True, "nvml"), (False, "nvidia-smi")])
def test_the_device_that_torch_sees_is_asked_and_not_the_first_of_the_machine(
    machine: fakes.Machine, monkeypatch: pytest.MonkeyPatch, nvml: bool, source: str
) -> None:
    fakes.plug(machine, monkeypatch, nvml=nvml)
    reading = read_clocks(0)
    assert reading == clocks.Clocks(1980, 3201, 50, 120.4, "580.1", source)
    assert machine.asked == [("nvml" if nvml else "smi", "GPU-0000-2")]


@pytest.mark.parametrize("nvml", [True, False])
def test_a_slice_is_found_by_the_bus_of_its_gpu(
    machine: fakes.Machine, monkeypatch: pytest.MonkeyPatch, nvml: bool
) -> None:
    machine.slices = True
    fakes.plug(machine, monkeypatch, nvml=nvml)
    reading = read_clocks(0)
    assert reading is not None
    assert reading.sm_mhz == 1980
    assert [address for _, address in machine.asked] == list(fakes.SECOND)


def test_a_binding_without_a_driver_falls_back(machine: fakes.Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.plug(machine, monkeypatch)
    import pynvml

    def init() -> None:
        raise RuntimeError("NVML Shared Library Not Found")

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    reading = read_clocks(0)
    assert reading is not None
    assert reading.source == "nvidia-smi"


def test_a_value_that_nvml_does_not_tell_is_asked_of_the_tool(
    machine: fakes.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.plug(machine, monkeypatch)
    import pynvml

    def power(handle: object) -> int:
        raise RuntimeError("Not Supported")

    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", power)
    reading = read_clocks(0)
    assert reading is not None
    assert reading.source == "nvidia-smi"


def test_nobody_to_ask(machine: fakes.Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    fakes.plug(machine, monkeypatch, nvml=False, smi=False)
    assert read_clocks(0) is None
    assert clocks.processes_at(fakes.SECOND) == []
    fakes.plug(machine, monkeypatch)
    assert read_clocks(1) is None  # torch has no such device; another GPU is not asked in its place
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert read_clocks(0) is None
    assert machine.asked == []


@pytest.mark.parametrize(
    ("properties", "addresses"),
    [
        ({"uuid": "a-b"}, ("GPU-a-b",)),
        ({"uuid": "GPU-a-b"}, ("GPU-a-b",)),
        ({"uuid": "MIG-a-b", "pci_bus_id": 1}, ("MIG-a-b", "00000000:01:00.0")),
        ({"pci_bus_id": 0xC1, "pci_device_id": 2, "pci_domain_id": 0x10000}, ("00010000:C1:02.0",)),
        ({}, ()),
    ],
)
def test_addresses(properties: dict[str, Any], addresses: tuple[str, ...]) -> None:
    assert clocks.addresses_of(SimpleNamespace(**properties)) == addresses


def test_smi_line() -> None:
    reading = clocks.parse_smi("1980, 3201, 45, 120.53, 580.159.04")
    assert reading == clocks.Clocks(1980, 3201, 45, 120.53, "580.159.04", "nvidia-smi")
    assert clocks.parse_smi("[N/A], 3201, 45, 120.53, 580") is None
    assert clocks.parse_smi("garbage") is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("No running processes found\n", []),
        ("12, python, 300\n", [GpuProcess(12, "python", 300)]),
        # A name may hold commas.
        ("12, /opt/a, b/python, 300 MiB\n7, [Not Found], [N/A]\n",
         [GpuProcess(12, "/opt/a, b/python", 300), GpuProcess(7, "", 0)]),
        ("x, python, 300\n12, python\n, ,\n", []),
        ("8, train, \n", [GpuProcess(8, "train", 0)]),
    ],
)  # fmt: skip
def test_processes_of_the_tool(text: str, found: list[GpuProcess]) -> None:
    assert clocks.parse_processes(text) == found


@pytest.mark.parametrize("nvml", [True, False])
def test_processes_of_the_device_that_torch_sees(
    machine: fakes.Machine, monkeypatch: pytest.MonkeyPatch, nvml: bool
) -> None:
    machine.processes = [[(5, "first", 9)], [(12, "train", 300)]]
    fakes.plug(machine, monkeypatch, nvml=nvml)
    assert clocks.processes_at(clocks.gpu_addresses(0)) == [GpuProcess(12, "train", 300)]


def test_a_process_that_nvml_cannot_name_counts(machine: fakes.Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.processes[1] = [(12, "", 0)]
    fakes.plug(machine, monkeypatch)
    assert clocks.processes_at(fakes.SECOND) == [GpuProcess(12, "", 0)]


@pytest.mark.gpu
def test_the_device_present_is_found() -> None:
    reading = read_clocks(0)
    assert reading is not None
    assert 100 < reading.sm_mhz < 5000
    assert 0 < reading.temperature_c < 110
    found = {process.pid: process for process in clocks.processes_at(clocks.gpu_addresses(0))}
    assert all(process.mib >= 0 for process in found.values())
