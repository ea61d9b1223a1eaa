"""What a run says of its GPUs: clocks around final timings, and other programs that come and go."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import gpu_fakes as fakes
import pytest

from bole_codegen.measure.clocks import Clocks, GpuProcess
from bole_codegen.measure.others import names_of, own_processes, strangers
from bole_codegen.measure.watch import Watch, describe

ME = os.getpid()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[fakes.Machine]:
    machine = fakes.Machine()
    fakes.plug(machine, monkeypatch)
    yield machine
    fakes.unplug()


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process that is neither ours nor a parent: its own parent has gone."""
    code = "import os, sys, time\nif os.fork(): os._exit(0)\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    pid = int(child.stdout.readline())
    child.wait()
    yield pid
    os.kill(pid, 9)


@pytest.fixture
def worker() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        yield child.pid
        child.kill()


def _reading(sm: int, temperature: int, power: float = 100.0) -> Clocks:
    return Clocks(sm, 3201, temperature, power, "580", "nvml")


def test_clocks_on_one_line() -> None:
    assert describe([]) == ""
    assert describe([_reading(1980, 45)]) == "SM 1980 MHz, memory 3201 MHz, 45 C"
    two = [_reading(1980, 45, 120.4), _reading(1755, 61, 650.0)]
    assert describe(two, power=True) == "SM 1755 to 1980 MHz, memory 3201 MHz, 45 to 61 C, 120 to 650 W"


def test_names_of_programs() -> None:
    found = [GpuProcess(i, "train" if i else "", 10) for i in range(5)]
    assert names_of(found[:1]) == "a process (pid 0, 10 MiB)"
    assert names_of(found).endswith("train (pid 2, 10 MiB) and 2 more")


def test_who_is_a_stranger(stranger: int, worker: int) -> None:
    ours, theirs = [GpuProcess(p, "python", 1) for p in (ME, worker)], GpuProcess(stranger, "train", 1)
    gone = GpuProcess(1 << 30, "", 1)
    assert own_processes([*ours, theirs, gone]) == {ME, worker}
    assert strangers([*ours, theirs]) == [theirs]
    # One whose number means nothing here may be of another container, or one of ours that has just ended.
    assert strangers([theirs, gone]) == [theirs, gone]
    assert strangers([*ours, theirs, gone], working=True) == [theirs]
    # None of ours is among them though they work: the driver numbers processes otherwise than this container.
    assert strangers([theirs, gone], working=True) == []


def test_a_program_on_the_gpu_is_named_once_whenever_it_comes(
    machine: fakes.Machine, stranger: int, worker: int
) -> None:
    said: list[str] = []
    watch = Watch([0], said.append)
    machine.processes = [[(1 << 29, "elsewhere", 5)], [(1 << 30, "train", 300)]]
    watch.begin()
    assert said == [
        f"warning: GPU 0 is shared with train (pid {1 << 30}, 300 MiB): times will be noisy, spreads say how much"
    ]
    machine.processes[1] = [(worker, "python", 900), (1 << 30, "train", 300)]
    watch.note(0)
    assert len(said) == 1
    machine.processes[1] += [(stranger, "serve", 70)]
    watch._gpus[0].free_at = 0.0
    watch.note(0)
    assert said[1:] == [
        f"warning: GPU 0 is shared meanwhile with serve (pid {stranger}, 70 MiB): times are noisy from now on, "
        "spreads say how much"
    ]
    # A worker that has just been closed may still be listed.
    machine.processes[1] += [(1 << 28, "late", 1)]
    watch.end()
    assert len(said) == 3
    assert said[2].startswith(f"warning: GPU 0 is shared at the end with late (pid {1 << 28}, 1 MiB): not there when")
    assert watch.line().endswith("; other programs were on GPU 0")
    assert watch.facts()["other programs"] == (
        f"GPU 0: train (pid {1 << 30}, 300 MiB), serve (pid {stranger}, 70 MiB), late (pid {1 << 28}, 1 MiB)"
    )


def test_nothing_is_said_of_a_gpu_of_our_own(machine: fakes.Machine, worker: int) -> None:
    said: list[str] = []
    watch = Watch([0], said.append)
    watch.begin()
    machine.processes[1] = [(worker, "python", 900), (ME, "python", 1)]
    watch.note(0)
    watch.end()
    assert said == []
    assert watch.facts()["other programs"] == ""


def test_a_table_says_what_final_timings_ran_at(machine: fakes.Machine) -> None:
    watch = Watch([0])
    watch.begin()
    begun = "SM 1980 MHz, memory 3201 MHz, 50 C when the run began"
    assert watch.line() == begun
    for sm, temperature in ((1755, 61), (1800, 63)):
        machine.sm[1], machine.temperature[1] = sm, temperature
        watch._gpus[0].free_at = 0.0
        asyncio.run(watch.compared(0))
    assert watch.line() == f"SM 1755 to 1800 MHz, memory 3201 MHz, 61 to 63 C at final timings, {begun}"
    machine.sm[1] = 345
    watch.end()
    assert watch.facts() == {
        "clocks when the run began": "GPU 0: SM 1980 MHz, memory 3201 MHz, 50 C, 120 W",
        "clocks at final timings": "GPU 0: SM 1755 to 1800 MHz, memory 3201 MHz, 61 to 63 C, 120 W (2 readings)",
        "clocks at the end": "GPU 0: SM 345 MHz, memory 3201 MHz, 63 C, 120 W",
        "other programs": "",
    }


def test_every_device_is_read(machine: fakes.Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from bole_codegen.measure import watch as module

    for count, line in ((2, "GPU 1: SM 1101 MHz, memory 3201 MHz, 41 C"), (8, "8 GPUs: SM 1100 to 1107 MHz")):
        monkeypatch.setattr(module, "gpu_addresses", lambda device: (str(device),))
        monkeypatch.setattr(module, "clocks_at", lambda found: _reading(1100 + int(found[0]), 40 + int(found[0])))
        monkeypatch.setattr(module, "processes_at", lambda found: [])
        watch = Watch(range(count))
        watch.begin()
        for place in range(count):
            watch.note(place)
        assert line in watch.line()
        assert len(watch.line()) <= 400
        assert watch.facts()["clocks at final timings"].count("GPU ") == count


def test_a_slow_tool_is_seldom_asked(machine: fakes.Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from bole_codegen.measure import watch as module

    def slow(addresses: object) -> None:
        time.sleep(0.05)

    monkeypatch.setattr(module, "clocks_at", slow)
    watch = Watch([0])
    watch.note(0)
    assert time.monotonic() + 0.3 < watch._gpus[0].free_at < time.monotonic() + 5.0
    asked = len(machine.asked)
    watch.note(0)
    assert len(machine.asked) == asked


def test_without_devices_and_without_tools_nothing_is_said(
    machine: fakes.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.plug(machine, monkeypatch, nvml=False, smi=False)
    for devices in ([], [0]):
        watch = Watch(devices, lambda text: pytest.fail(text))
        watch.begin()
        for place in range(len(devices)):
            watch.note(place)
        watch.end()
        assert watch.line() == ""
        assert set(watch.facts().values()) == {""}
