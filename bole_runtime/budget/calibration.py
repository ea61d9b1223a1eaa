"""Measuring the complete forward over batch, nodes, context length and depth."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bole_runtime.budget.table import (
    CalibrationError,
    CalibrationTable,
    Timing,
    check_target,
    load_calibration,
    save_calibration,
)

Run = Callable[[], object]
_MOST = 1 << 31
_LONGEST_US = 1e9
_INCOMPLETE = "; incomplete: "
#: Runs a function once and returns its time in microseconds.
Timer = Callable[[Run], float]


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


def calibrate(
    forward: Callable[[Point], Run | None],
    *,
    batches: Sequence[int],
    nodes: Sequence[int],
    kv_lengths: Sequence[int],
    depths: Sequence[int] = (8,),
    name: str = "",
    device: torch.device | str | None = None,
    repeats: int = 20,
    warmup: int = 3,
    timer: Timer | None = None,
    path: Path | str | None = None,
    progress: Callable[[str], None] | None = None,
    resume: bool = False,
) -> CalibrationTable:
    """Measure the complete forward: attention, recurrent layers, MLPs, head, whatever a serving step runs.

    For every batch, context length and depth, decoding and all tree sizes are prepared first and then timed in
    rotation, so that a change of clocks meets all of them alike. Such a group is whole or not there: each is written
    when it is finished, and a calibration that did not end says in ``protocol`` how many there should be.

    Args:
        forward: given a :class:`Point`, returns the function that runs one forward of it (usually the replay of a
            captured graph), or None if that cannot run here (too large); it is then left out.
        batches: numbers of requests.
        nodes: nodes a request; 1 (plain decoding) is added.
        kv_lengths: context lengths.
        depths: depths of trees, cut to ``nodes - 1``.
        name: what is calibrated, for the file.
        device: what is timed with CUDA events; default the CUDA device if there is one. A CPU is timed by its clock.
        repeats: timed runs of a point, 3 at least.
        warmup: runs before them.
        timer: replaces the timing of one run.
        path: file to write, in one step after every group (one batch and context length).
        progress: called with a line for every group of points.
        resume: keep what the file at ``path`` holds, if there is one, and measure what it lacks. It must be of the same
            name, device, torch and repeats. A group that lacks a point that can run now is measured again, so that what
            is compared was timed together.

    Returns:
        The table; medians with the distance between quartiles.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a list is empty, a number is out of range, ``name`` or ``path`` could not be written, or the file to
            resume is of something else. Nothing has run.
        OSError: likewise, the folder of ``path`` cannot be written.
        CalibrationError: decoding itself cannot run for some batches and context lengths (all others were measured),
            or something failed (nothing was measured after it). Finished groups are in the file and in the error's
            ``table``. Also if the file to resume cannot be read.
    """
    for what, values, low in (("batches", batches, 1), ("nodes", nodes, 1), ("kv_lengths", kv_lengths, 0),
                              ("depths", depths, 1)):  # fmt: skip
        kind: object = values
        if isinstance(kind, str) or not isinstance(kind, Sequence):
            raise TypeError(f"{what}: expected a list or tuple of integers, got {type(values).__name__}")
        if not values or any(isinstance(v, bool) or not isinstance(v, int) or not low <= v <= _MOST for v in values):
            raise ValueError(
                f"{what}: {list(values)} is not allowed; allowed: one or more integers from {low} to {_MOST}"
            )
    for what, number in (("repeats", repeats), ("warmup", warmup)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{what}: expected an int, got {type(number).__name__}")
    if repeats < 3 or warmup < 0:
        raise ValueError(f"repeats, warmup: {repeats}, {warmup} is not allowed; allowed: from 3, from 0")
    for what, function in (("forward", forward), ("timer", timer), ("progress", progress)):
        if not (callable(function) or (function is None and what != "forward")):
            raise TypeError(f"{what}: expected a function, got {type(function).__name__}")
    if not isinstance(resume, bool):
        raise TypeError(f"resume: expected a bool, got {type(resume).__name__}")
    path = check_target(name, path)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    measure = timer or (_cuda_timer(where) if where.type == "cuda" else _clock)
    groups = [(batch, kv) for batch in sorted(set(batches)) for kv in sorted(set(kv_lengths))]
    file = _File(
        path,
        name,
        torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        f"median of {repeats} runs after {warmup}, points in rotation",
        groups,
    )
    if resume:
        file.read()
    failed = []
    for batch, kv in groups:
        points, before = list(_points(batch, kv, nodes, depths)), file.done.get((batch, kv), [])
        if progress is not None:
            progress(f"batch {batch}, kv {kv}: {len(points)} points{', some measured before' if before else ''}")
        try:
            runs = _prepare(forward, points, before)
            if runs or not before:
                file.done[batch, kv] = _measure(runs, measure, repeats, warmup) if runs else []
        except Exception as error:
            raise file.unfinished([f"batch {batch}, kv {kv}: {type(error).__name__}: {error}"]) from error
        if file.done[batch, kv]:
            file.write()
        else:
            failed.append(f"decoding cannot run at batch {batch}, kv {kv}: forward gave None")
    if failed:
        raise file.unfinished(failed)
    return file.table()


class _File:
    """Groups that are finished, and the file that holds them."""

    def __init__(self, path: Path | None, name: str, device: str, protocol: str, groups: list[tuple[int, int]]) -> None:
        self._path, self._groups, self._protocol = path, groups, protocol
        self._name, self._device, self._torch, self._date = name, device, torch.__version__, _today()
        self.done: dict[tuple[int, int], list[Timing]] = {}

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

    def table(self) -> CalibrationTable:
        """Return the finished groups."""
        finished = sum(bool(self.done.get(g)) for g in self._groups)
        incomplete = f"{_INCOMPLETE}{finished} of {len(self._groups)} groups" if finished < len(self._groups) else ""
        return CalibrationTable(
            [entry for group in self.done.values() for entry in group],
            name=self._name,
            device=self._device,
            date=self._date,
            torch_version=self._torch,
            protocol=self._protocol + incomplete,
        )

    def write(self) -> None:
        if self._path is not None:
            save_calibration(self.table(), self._path)

    def unfinished(self, reasons: list[str]) -> CalibrationError:
        """Return the error that says what failed, what is whole, and how to go on."""
        whole = any(self.done.values())
        if not whole:
            kept = "nothing was measured"
        elif self._path is None:
            kept = "what is whole is the error's table; with path= it could be resumed"
        else:
            kept = f"what is whole is in {self._path}; the same call with resume=True measures the rest"
        error = CalibrationError(f"{'; '.join(reasons)} ({kept})")
        error.table = self.table() if whole else None
        return error


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def _points(batch: int, kv: int, nodes: Sequence[int], depths: Sequence[int]) -> Iterable[Point]:
    yield Point(batch, 1, kv, 0)
    made = {(min(d, n - 1), n) for n in nodes if n > 1 for d in depths}
    for depth, count in sorted(made):
        yield Point(batch, count, kv, depth)


def _prepare(
    forward: Callable[[Point], Run | None], points: list[Point], before: list[Timing]
) -> list[tuple[Point, Run]]:
    """Return what to time of a group, nothing where it is whole or decoding cannot run."""
    old = [Point(e.batch, e.nodes, e.kv, e.depth) for e in before]
    made: dict[Point, Run] = {}
    for point in [p for p in points if p not in old] + old:
        if point in old and not made:
            return []
        run = forward(point)
        if run is not None:
            made[point] = run
        elif point.nodes == 1:
            return []
    return sorted(made.items(), key=lambda item: (item[0].depth, item[0].nodes))


def _measure(runs: list[tuple[Point, Run]], measure: Timer, repeats: int, warmup: int) -> list[Timing]:
    for _, run in runs:
        for _ in range(warmup):
            run()
    times: dict[Point, list[float]] = {point: [] for point, _ in runs}
    for _ in range(repeats):
        for point, run in runs:
            times[point].append(measure(run))
    made = []
    for point, taken in times.items():
        if not all(0 <= t <= _LONGEST_US for t in taken):
            raise CalibrationError(f"{point}: the timer gave {min(taken)} to {max(taken)} us")
        low, middle, high = statistics.quantiles(taken, n=4)
        spread = max(0.0, high - low)
        made.append(
            Timing(
                batch=point.batch,
                kv=point.kv,
                depth=point.depth,
                nodes=point.nodes,
                median_us=max(middle, 1e-3),
                spread_us=spread,
                repeats=repeats,
            )
        )
    return made


def _clock(run: Run) -> float:
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e6


def _cuda_timer(device: torch.device) -> Timer:
    def measure(run: Run) -> float:
        with torch.cuda.device(device):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            run()
            last.record()
            last.synchronize()
        return float(first.elapsed_time(last)) * 1e3

    return measure
