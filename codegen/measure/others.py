"""Other programs on a GPU: they disturb what is timed there, so a run says so."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence

from bole_codegen.measure.clocks import read_clocks


def _family(pid: int) -> set[int]:
    """Return a process and its parents, as far as they can be seen."""
    found = set()
    while pid > 1 and pid not in found:
        found.add(pid)
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                pid = int(file.read().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError, ValueError):
            break
    return found


def parse_processes(text: str) -> list[tuple[int, str, int]]:
    """Parse lines ``pid, name, MiB`` of nvidia-smi; what is not a number counts as 0 MiB."""
    found = []
    for line in text.splitlines():
        fields = [f.strip() for f in line.split(",")]
        if len(fields) < 3 or not fields[0].isdigit():
            continue
        memory = fields[-1].split()[0] if fields[-1] else ""
        found.append((int(fields[0]), ", ".join(fields[1:-1]), int(memory) if memory.isdigit() else 0))
    return found


def other_processes(index: int = 0) -> list[tuple[int, str, int]]:
    """Return (pid, name, MiB) of the programs that compute on GPU ``index`` now; empty where nobody can tell.

    Call it before this program uses the GPU: in a container its own processes may appear under other numbers.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = ["--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run([tool, f"--id={index}", *query], capture_output=True, text=True, timeout=10, check=True)
        mine = _family(os.getpid())
        return [p for p in parse_processes(done.stdout) if p[0] not in mine]
    return []


def warn_of_others(devices: Sequence[int], say: Callable[[str], None]) -> None:
    """Say which other programs are on the GPUs that are about to be used."""
    for index in devices:
        found = other_processes(index)
        if found:
            names = ", ".join(f"{name or 'a process'} (pid {pid}, {mib} MiB)" for pid, name, mib in found[:3])
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            say(f"warning: GPU {index} is shared with {names}{more}: times will be noisy, spreads say how much")


def clocks_line(index: int) -> str:
    """Return clocks, temperature and power now, empty where they cannot be read."""
    now = read_clocks(index)
    if now is None:
        return ""
    return f"SM {now.sm_mhz} MHz, memory {now.memory_mhz} MHz, {now.temperature_c} C, {now.power_w:.0f} W"
