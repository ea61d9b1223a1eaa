"""``bole-tune --verify``: recheck every entry of a table, numbers and time, on the GPU that is present."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bole_codegen.search.evaluators import Evaluator
from bole_codegen.search.kinds import kind_of
from bole_codegen.search.results import Failed, Timed
from bole_codegen.search.targets import Target, class_of
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config, GpuLimits
from bole_runtime.tables.load import CheckedEntry
from bole_runtime.tables.schema import AnyEntry

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
    """

    key: str
    status: str
    message: str
    us: float | None = None
    default_us: float | None = None


def target_of(problem: Specialisation, entry: AnyEntry | None = None) -> Target:
    """Return a launch that falls into a bucket: the one that an entry was timed with, where the bucket has many."""
    return kind_of(problem).target_of(problem, getattr(entry, "timed_channels", None))


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
        verdict = await _verify(entry, evaluator, default(entry.problem, limits), device)
        tell(verdict)
        return verdict

    return asyncio.run(every())


async def _verify(entry: CheckedEntry, evaluator: Evaluator, default: Config, device: int) -> Verdict:
    target, kernels = target_of(entry.problem, entry.entry), class_of(entry.problem)
    for config in dict.fromkeys((entry.config, default)):
        for step in (evaluator.screen(kernels, config, True), evaluator.confirm(kernels, config)):
            result = await step
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
