"""Where the time of a run went: what every worker was busy with, and how long the device had nothing to do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Phases of work, in the order that reports list them.
PHASES: dict[str, str] = {
    "start": "starting processes",
    "compile": "compiling",
    "wait": "waiting for the device",
    "check": "checking against the reference",
    "draw": "drawing inputs",
    "time": "timing candidates",
    "finals": "comparing finalists",
    "run": "other work",
}
#: Phases during which the device is in use.
ON_DEVICE = frozenset({"check", "draw", "time", "finals"})


def now() -> float:
    """Return the seconds of the running event loop, which a simulation may let run faster; else of the clock."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


@dataclass
class Ledger:
    """Seconds by phase, summed over the workers.

    Attributes:
        seconds: phase to seconds of all workers together.
        counts: phase to the number of times it was entered.
        workers: role (``compile``, ``check``, ``time``) to processes.
        device_busy: seconds in which at least one worker used the device.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    workers: dict[str, int] = field(default_factory=dict)
    device_busy: float = 0.0
    _begun: float | None = None
    _using: int = 0
    _since: float = 0.0

    def enter(self, phase: str) -> None:
        """A worker begins a phase."""
        if self._begun is None:
            self._begun = now()
        self.counts[phase] = self.counts.get(phase, 0) + 1
        if phase in ON_DEVICE:
            if self._using == 0:
                self._since = now()
            self._using += 1

    def leave(self, phase: str, seconds: float) -> None:
        """A worker ends a phase that took so long."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        if phase in ON_DEVICE and self._using:
            self._using -= 1
            if self._using == 0:
                self.device_busy += now() - self._since

    def report(self, wall: float) -> dict[str, float]:
        """Return seconds by phase, rounded, for JSON; ``device_idle`` where a device was used at all."""
        found = {p: round(s, 2) for p in PHASES if (s := self.seconds.get(p)) is not None}
        if ON_DEVICE & set(self.seconds):
            found["device_busy"] = round(self.device_busy, 2)
            found["device_idle"] = round(max(0.0, wall - self.device_busy), 2)
        if self.seconds.get("compile") and self.workers.get("compile"):
            found["compile_workers_busy"] = round(
                self.seconds["compile"] / max(1e-9, wall * self.workers["compile"]), 3
            )
        return found


def describe(report: Mapping[str, float]) -> str:
    """Return :meth:`Ledger.report` on one line."""
    parts = [f"{PHASES[p]} {report[p]:.1f} s" for p in PHASES if report.get(p, 0.0) >= 0.05]
    if "compile_workers_busy" in report:
        parts.append(f"compiling processes {report['compile_workers_busy']:.0%} busy")
    if "device_idle" in report:
        parts.append(f"device idle {report['device_idle']:.1f} s")
    return ", ".join(parts)
