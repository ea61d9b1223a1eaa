"""What the GPUs of a run did around its final timings, and who else used them meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bole_codegen.measure.clocks import Clocks, GpuProcess, clocks_at, gpu_addresses, processes_at
from bole_codegen.measure.others import names_of, own_processes, strangers
from bole_runtime.tables.words import counted

#: A GPU is read for at most one part in so many of the time: nvidia-smi can take half a second.
SELDOM = 10.0
#: Characters of a table's line of clocks before what else is said there; a longer one is put for all devices together.
ROOM = 340


def describe(readings: Sequence[Clocks], power: bool = False) -> str:
    """Return readings on one line, as ranges; empty without any.

    Args:
        readings: of one GPU, or of several of a kind.
        power: whether to say the power drawn.
    """
    if not readings:
        return ""
    parts = [
        f"SM {_range([r.sm_mhz for r in readings])} MHz",
        f"memory {_range([r.memory_mhz for r in readings])} MHz",
        f"{_range([r.temperature_c for r in readings])} C",
    ]
    return ", ".join(parts + ([f"{_range([round(r.power_w) for r in readings])} W"] if power else []))


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"


@dataclass
class _Gpu:
    """One device.

    Attributes:
        device: CUDA index.
        addresses: what it is asked for by.
        begun: reading when the run began.
        finals: readings right after comparisons of finalists.
        ended: reading when the run was over.
        known: pids that were named, or are of this program.
        others: other programs, as they were named.
        free_at: when it may be read again.
    """

    device: int
    addresses: tuple[str, ...] = ()
    begun: list[Clocks] = field(default_factory=list)
    finals: list[Clocks] = field(default_factory=list)
    ended: list[Clocks] = field(default_factory=list)
    known: set[int] = field(default_factory=set)
    others: list[GpuProcess] = field(default_factory=list)
    free_at: float = 0.0

    def read(self) -> list[Clocks]:
        """Return a reading, or none."""
        found = clocks_at(self.addresses)
        return [] if found is None else [found]

    def look(self, working: bool) -> list[GpuProcess]:
        """Return other programs that were not seen before."""
        found = processes_at(self.addresses)
        fresh = [p for p in strangers(found, working) if p.pid not in self.known]
        self.known |= own_processes(found) | {p.pid for p in fresh}
        self.others += fresh
        return fresh


class Watch:
    """Reads the GPUs of a run when it begins, after each comparison of finalists, and when it is over.

    Args:
        devices: CUDA indices; none for a run without a GPU.
        say: takes a warning.
    """

    def __init__(self, devices: Sequence[int], say: Callable[[str], None] = lambda text: None) -> None:
        self._gpus = [_Gpu(d) for d in devices]
        self._say = say
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Read every device and name other programs on it. Call it before this program uses them."""
        for gpu in self._gpus:
            gpu.addresses = gpu_addresses(gpu.device)
            gpu.begun = gpu.read()
            self._warn(gpu, gpu.look(working=False), "is shared with", "times will be noisy, spreads say how much")

    async def compared(self, place: int) -> None:
        """Read a device right after finalists were compared there, before it clocks down.

        Args:
            place: among the devices.
        """
        await asyncio.to_thread(self.note, place)

    def note(self, place: int) -> None:
        """See :meth:`compared`."""
        gpu = self._gpus[place]
        with self._lock:  # Groups of buckets that share a device end side by side.
            begun = time.monotonic()
            if begun < gpu.free_at:
                return
            gpu.finals += gpu.read()
            what = "times are noisy from now on, spreads say how much"
            self._warn(gpu, gpu.look(working=True), "is shared meanwhile with", what)
            gpu.free_at = time.monotonic() + SELDOM * (time.monotonic() - begun)

    def end(self) -> None:
        """Read every device, and name programs that came after the beginning. Call it when workers are gone."""
        for gpu in self._gpus:
            gpu.ended = gpu.read()
            what = "not there when the run began, so times may be noisier than they should be"
            self._warn(gpu, gpu.look(working=False), "is shared at the end with", what)

    def line(self) -> str:
        """Return what final timings ran at, and how the run began, for a table; empty where nobody could tell."""
        each = [self._of(g.finals, g.begun, f"GPU {g.device}: " if len(self._gpus) > 1 else "") for g in self._gpus]
        text = "; ".join(e for e in each if e)
        if len(text) > ROOM:
            every = [r for g in self._gpus for r in g.finals], [r for g in self._gpus for r in g.begun]
            text = self._of(*every, f"{len(self._gpus)} GPUs: ")
        shared = [str(g.device) for g in self._gpus if g.others]
        return text + (f"; other programs were on GPU {', '.join(shared)}" if shared else "")

    def facts(self) -> dict[str, str]:
        """Return what a report says of the devices, by name; empty texts where nobody could tell."""
        parts = {
            "clocks when the run began": [(g, g.begun, "") for g in self._gpus],
            "clocks at final timings": [(g, g.finals, f" ({counted(len(g.finals), 'reading')})") for g in self._gpus],
            "clocks at the end": [(g, g.ended, "") for g in self._gpus],
        }
        facts = {
            name: "; ".join(f"GPU {g.device}: {describe(r, power=True)}{more}" for g, r, more in each if r)
            for name, each in parts.items()
        }
        facts["other programs"] = "; ".join(f"GPU {g.device}: {names_of(g.others)}" for g in self._gpus if g.others)
        return facts

    @staticmethod
    def _of(finals: Sequence[Clocks], begun: Sequence[Clocks], prefix: str) -> str:
        texts = [(describe(finals), "at final timings"), (describe(begun), "when the run began")]
        found = ", ".join(f"{text} {when}" for text, when in texts if text)
        return prefix + found if found else ""

    def _warn(self, gpu: _Gpu, found: Sequence[GpuProcess], how: str, what: str) -> None:
        if found:
            self._say(f"warning: GPU {gpu.device} {how} {names_of(found)}: {what}")
