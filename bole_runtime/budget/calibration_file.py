"""The groups of a calibration that are finished, and the file that holds them."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import torch

from bole_runtime.budget.table import (
    CalibrationError,
    CalibrationTable,
    Timing,
    load_calibration,
    save_calibration,
)

_INCOMPLETE = "; incomplete: "


@dataclass(frozen=True)
class Point:
    """One setting to measure.

    Attributes:
        batch: requests.
        nodes: nodes a request; 1 is plain decoding.
        kv: context length.
        depth: largest number of strict ancestors; 0 when decoding.
    """

    batch: int
    nodes: int
    kv: int
    depth: int


def point_of(timing: Timing) -> Point:
    """Return what was timed."""
    return Point(timing.batch, timing.nodes, timing.kv, timing.depth)


class CalibrationFile:
    """Groups that are finished, and the file that holds them."""

    def __init__(
        self, path: Path | None, name: str, device: str, protocol: str, groups: dict[tuple[int, int], list[Point]]
    ) -> None:
        self._path, self._groups, self._protocol = path, groups, protocol
        self._name, self._device, self._torch, self._date = name, device, torch.__version__, _today()
        self.done: dict[tuple[int, int], list[Timing]] = {}
        self._whole: set[tuple[int, int]] = set()  # what of done has all that was asked for

    def read(self) -> None:
        """Take the groups of the file, if there is one."""
        if self._path is None:
            raise ValueError("resume: there is nothing to resume without path")
        if not self._path.exists():
            return
        table = load_calibration(self._path)
        for what, given, value in (
            ("label", table.label, "measured"),
            ("name", table.name, self._name),
            ("device", table.device, self._device),
            ("torch", table.torch_version, self._torch),
            ("protocol", table.protocol.split(_INCOMPLETE)[0], self._protocol),
        ):
            if given != value:
                raise ValueError(
                    f"resume: {what} of {self._path} is {given!r}, not {value!r}; calibrate to another file"
                )
        for entry in table.entries:
            self.done.setdefault((entry.batch, entry.kv), []).append(entry)
        for group, points in self._groups.items():
            if set(points) <= {point_of(e) for e in self.done.get(group, [])}:
                self._whole.add(group)

    def finish(self, group: tuple[int, int], timings: list[Timing]) -> None:
        """Take a group that has all that can run of it."""
        self.done[group] = timings
        self._whole.add(group)
        self.write()

    def table(self) -> CalibrationTable:
        """Return what was measured; ``protocol`` says how many of the groups are whole."""
        finished, asked = len(self._whole), len(self._groups)
        incomplete = f"{_INCOMPLETE}{finished} of {asked} groups" if finished < asked else ""
        return CalibrationTable(
            [entry for group in self.done.values() for entry in group],
            name=self._name,
            device=self._device,
            date=self._date,
            torch_version=self._torch,
            protocol=self._protocol + incomplete,
        )

    def write(self) -> None:
        """Write the file, if there is to be one."""
        if self._path is not None:
            save_calibration(self.table(), self._path)

    def unfinished(self, reasons: list[str]) -> CalibrationError:
        """Return the error that says what failed, what is whole, and how to go on; the file says it is incomplete."""
        whole = any(self.done.values())
        if not whole:
            kept = "nothing was measured"
        elif self._path is None:
            kept = "what is whole is the error's table; with path= it could be resumed"
        else:
            try:
                self.write()
                kept = f"what is whole is in {self._path}; the same call with resume=True measures the rest"
            except (OSError, ValueError) as error:
                kept = f"what is whole is the error's table alone: {self._path} cannot be written: {error}"
        made = CalibrationError(f"{'; '.join(reasons)} ({kept})")
        made.table = self.table() if whole else None
        return made


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()
