"""``bole-tune --verify``: recheck every entry of a table, numbers and time, on the GPU that is present."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bole_codegen.search.evaluators import Evaluator
from bole_codegen.search.kinds import kind_of
from bole_codegen.search.results import Failed, Timed
from bole_codegen.search.targets import Target, check_shape, class_of
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config, GpuLimits
from bole_runtime.tables.load import CheckedEntry
from bole_runtime.tables.schema import AnyEntry, launch_of

#: An entry whose time moved by more than this, as a fraction, is reported.
DRIFT = 0.1


@dataclass(frozen=True)
class Verdict:
    """What became of one entry.

    Attributes:
        key: of the entry.
        status: ``ok``, ``slower`` or ``faster`` than the table says, ``behind`` the analytic default, or ``failed``.
        message: one line.
        us: time now, None when it failed.
        default_us: of the analytic default in the same run.
        launch: what was timed, as entries say it.
        launch_recorded: whether the entry says so; else it is a usual launch of the bucket, and times may differ.
    """

    key: str
    status: str
    message: str
    us: float | None = None
    default_us: float | None = None
    launch: dict[str, int | str] | None = None
    launch_recorded: bool = False


def target_of(problem: Specialisation, entry: AnyEntry | None = None) -> Target:
    """Return a launch that falls into a bucket: the one that an entry was timed with, as far as it says that.

    Raises:
        ValueError: the entry names a tree shape that is unknown.
    """
    said = (
        {} if entry is None else {n: getattr(entry, n, None) for n in ("hk", "hv", "timed_channels", "batch", "shape")}
    )
    target = kind_of(problem).target_of(problem, {n: v for n, v in said.items() if v is not None})
    check_shape(target.shape)
    return target


def verify_entries(
    entries: Sequence[CheckedEntry],
    evaluator: Evaluator,
    default: Callable[[Specialisation, GpuLimits], Config],
    limits: GpuLimits,
    tell: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Check and time entries, each against the analytic default.

    Args:
        entries: of tables of the GPU that is present.
        evaluator: measures.
        default: the analytic default.
        limits: of the GPU.
        tell: called with each verdict.
    """

    async def every() -> list[Verdict]:
        evaluator.start()
        # All are compiled side by side; the device takes them one after the other.
        work = [one(i % evaluator.devices, e) for i, e in enumerate(entries)]
        return list(await asyncio.gather(*work))

    async def one(device: int, entry: CheckedEntry) -> Verdict:
        try:
            target = target_of(entry.problem, entry.entry)
        except ValueError as error:
            verdict = Verdict(entry.key, "failed", str(error))
        else:
            found = await _verify(target, entry, evaluator, default(entry.problem, limits), device)
            launch, recorded = kind_of(entry.problem).values(target), launch_of(entry.entry) is not None
            verdict = replace(found, launch=launch, launch_recorded=recorded)
        tell(verdict)
        return verdict

    return asyncio.run(every())


async def _verify(target: Target, entry: CheckedEntry, evaluator: Evaluator, default: Config, device: int) -> Verdict:
    kernels = class_of(entry.problem)
    for config in dict.fromkeys((entry.config, default)):
        for again in (False, True):
            checked = evaluator.confirm(kernels, config) if again else evaluator.screen(kernels, config, True)
            result = await checked
            if isinstance(result, Failed) and config == entry.config:
                return Verdict(entry.key, "failed", f"{result.kind}: {result.message}")
    times = await evaluator.finals(target, list(dict.fromkeys((entry.config, default))), device)
    mine, other = times[entry.config], times[default]
    if not isinstance(mine, Timed):
        return Verdict(entry.key, "failed", f"{mine.kind}: {mine.message}")
    base = other.median_us if isinstance(other, Timed) else None
    before = entry.entry.median_us
    text = f"{mine.median_us:.2f} us, the table has {before:.2f}"
    if base is not None and mine.median_us > base * (1 + DRIFT):
        return Verdict(entry.key, "behind", f"{text}; the default takes {base:.2f}", mine.median_us, base)
    if entry.entry.label == "measured" and abs(mine.median_us / before - 1) > DRIFT:
        status = "slower" if mine.median_us > before else "faster"
        return Verdict(entry.key, status, text, mine.median_us, base)
    return Verdict(entry.key, "ok", text, mine.median_us, base)
