"""Measuring the complete forward over batch, nodes, context length and depth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from bole_runtime.budget.calibration_file import CalibrationFile, Point, point_of
from bole_runtime.budget.table import CalibrationError, CalibrationTable, Timing, check_target

Run = Callable[[], object]
_MOST = 1 << 31
_LONGEST_US = 1e9
#: Runs a function once and returns its time in microseconds.
Timer = Callable[[Run], float]


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
        path: file to write, in one step after every group (one batch and context length); of a link, the regular file
            that it leads to.
        progress: called with a line for every group of points.
        resume: keep what the file at ``path`` holds, if there is one, and measure what it lacks. It must be of the same
            name, device, torch and repeats. A group that lacks a point that can run now is measured again, so that what
            is compared was timed together; a point of it that cannot run now keeps its time. Where decoding cannot run
            now, the group stays as it was.

    Returns:
        The table; medians with the distance between quartiles.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a list is empty, a number is out of range, ``name`` or ``path`` could not be written, or the file to
            resume is of something else. Nothing has run.
        OSError: likewise, the folder of ``path`` cannot be written.
        CalibrationError: decoding itself cannot run for some batches and context lengths (all others were measured),
            so that they, or points that a resumed file lacks, are missing; or something failed (nothing was measured
            after it). Finished groups are in the file and in the error's
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
    groups = {
        (batch, kv): list(_points(batch, kv, nodes, depths))
        for batch in sorted(set(batches))
        for kv in sorted(set(kv_lengths))
    }
    file = CalibrationFile(
        path,
        name,
        torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        f"median of {repeats} runs after {warmup}, points in rotation",
        groups,
    )
    if resume:
        file.read()
    failed = []
    for (batch, kv), points in groups.items():
        before = file.done.get((batch, kv), [])
        if progress is not None:
            progress(f"batch {batch}, kv {kv}: {len(points)} points{', some measured before' if before else ''}")
        try:
            runs, missing = _prepare(forward, points, before)
            if not missing:
                timed = {point for point, _ in runs}
                kept = [e for e in before if point_of(e) not in timed]
                file.finish((batch, kv), _measure(runs, measure, repeats, warmup) + kept)
        except Exception as error:
            raise file.unfinished([f"batch {batch}, kv {kv}: {type(error).__name__}: {error}"]) from error
        if missing:
            failed.append(f"decoding cannot run at batch {batch}, kv {kv}: forward gave None")
            if before:
                failed[-1] += f", missing: {', '.join(f'{p.nodes} nodes of depth {p.depth}' for p in missing)}"
    if failed:
        raise file.unfinished(failed)
    return file.table()


def _points(batch: int, kv: int, nodes: Sequence[int], depths: Sequence[int]) -> Iterable[Point]:
    yield Point(batch, 1, kv, 0)
    made = {(min(d, n - 1), n) for n in nodes if n > 1 for d in depths}
    for depth, count in sorted(made):
        yield Point(batch, count, kv, depth)


def _prepare(
    forward: Callable[[Point], Run | None], points: list[Point], before: list[Timing]
) -> tuple[list[tuple[Point, Run]], list[Point]]:
    """Return what to time of a group (nothing where it is whole), and what is missing since decoding cannot run."""
    old = [point_of(e) for e in before]
    new = [p for p in points if p not in old]
    made: dict[Point, Run] = {}
    for point in new + old:
        if point in old and not made:
            break
        run = forward(point)
        if run is not None:
            made[point] = run
        elif point.nodes == 1:
            return [], [p for p in made if p in new] or [point]
    return sorted(made.items(), key=lambda item: (item[0].depth, item[0].nodes)), []


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
