"""Other programs on a GPU: they disturb what is timed there, so a run says so; see ``watch.py``."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bole_codegen.measure.clocks import GpuProcess


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


def own_processes(found: Sequence[GpuProcess]) -> set[int]:
    """Return the pids among them of this program, its parents and what it started."""
    me = os.getpid()
    mine = _family(me)
    return {p.pid for p in found if p.pid in mine or me in _family(p.pid)}


def strangers(found: Sequence[GpuProcess], working: bool = False) -> list[GpuProcess]:
    """Return the programs that are no part of this one.

    Args:
        found: programs on a GPU.
        working: whether processes of this program use that GPU. In a container they may appear under other numbers,
            and none of theirs among those found says so: then nobody can tell who is a stranger.
    """
    own = own_processes(found)
    others = [p for p in found if p.pid not in own]
    if not working:
        return others
    # One of ours that has just ended is still listed, and has no parents any more.
    return [p for p in others if os.path.exists(f"/proc/{p.pid}")] if own else []


def names_of(found: Sequence[GpuProcess]) -> str:
    """Return the programs on one line, three of them by name."""
    names = ", ".join(f"{p.name or 'a process'} (pid {p.pid}, {p.mib} MiB)" for p in found[:3])
    return names + (f" and {len(found) - 3} more" if len(found) > 3 else "")
