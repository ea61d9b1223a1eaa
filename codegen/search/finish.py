"""The end of a class: neighbours, finalists, table entries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bole_codegen.search.choose import choose, make_entry
from bole_codegen.search.class_search import ClassSearch
from bole_codegen.search.environment import Environment
from bole_codegen.search.evaluators import Evaluator
from bole_codegen.search.kinds import kind_of
from bole_codegen.search.progress import Progress
from bole_codegen.search.results import PASSING_KINDS, Failed, Measurement, Screened, Screening
from bole_codegen.search.targets import Target, nearest_anchor
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config
from bole_runtime.tables.schema import AnyEntry

#: Comparisons of a bucket, should all finalists of one fail.
REFILLS = 3


@dataclass(frozen=True)
class Hints:
    """What tables say about a bucket.

    Attributes:
        held: the entry of this very bucket on this GPU, None without one.
        near: entries of other buckets or related GPUs, nearest first.
    """

    held: Config | None = None
    near: tuple[Config, ...] = ()


#: Buckets to what tables hold for them.
Incumbents = Callable[[Target], Hints]


@dataclass
class BucketResult:
    """The end of one bucket.

    Attributes:
        target: the bucket.
        entry: for the table; None when nothing could run.
        reason: why there is no entry; empty otherwise.
        reused: whether an earlier run had finished it.
    """

    target: Target
    entry: AnyEntry | None
    reason: str = ""
    reused: bool = False


class Finisher:
    """Turns the times of a class into entries.

    Args:
        env: of the run.
        evaluator: measures or predicts.
        top: finalists a bucket, the default and the table's entry not counted.
        incumbents: what tables hold.
        progress: what people see.
    """

    def __init__(
        self, env: Environment, evaluator: Evaluator, top: int, incumbents: Incumbents, progress: Progress
    ) -> None:
        self._env = env
        self._evaluator = evaluator
        self._top = top
        self._incumbents = incumbents
        self._progress = progress
        self._confirmed: dict[tuple[Specialisation, Config], asyncio.Future[Screening]] = {}

    async def time(self, search: ClassSearch, target: Target, config: Config, device: int) -> Measurement:
        """Time a candidate of a bucket, cheaply."""
        known = search.kept.time(target, config)
        if known is not None:
            search.set_time(target, config, known, keep=False)
            return known
        result = await self._evaluator.quick(target, config, device)
        search.set_time(target, config, result)
        self._progress.timed(target, config, result)
        return result

    async def finish(self, search: ClassSearch, device: int, done: Callable[[BucketResult], None]) -> None:
        """Compare finalists in every bucket of a class.

        Args:
            search: the class.
            device: where it is timed.
            done: called with each result as it is there.
        """
        self._progress.phase(f"comparing finalists of {_name(search)}")
        others = [t for t in search.members if t not in search.searched]
        await asyncio.gather(*(self._neighbours(search, t, device) for t in others))
        # In all buckets at once, so that compiling them keeps every process busy.
        first = {c for t in search.members for c in self._candidates(search, t)}
        await asyncio.gather(*(self._confirm(search, c) for c in sorted(first, key=str)))
        for target in search.members:
            result = await self._bucket(search, target, device)
            entry = result.entry
            times = (None, None) if entry is None else (entry.median_us, entry.default_us)
            self._progress.finished(target, *times)
            done(result)

    async def _neighbours(self, search: ClassSearch, target: Target, device: int) -> None:
        """Time the best of the searched buckets beside a bucket."""
        found = dict.fromkeys(c for t in _beside(target, search.searched) for c in search.best(t, self._top))
        fresh = [c for c in found if search.fits(target, c) and c not in search.times[target]]
        await asyncio.gather(*(self.time(search, target, c, device) for c in fresh))

    def _candidates(self, search: ClassSearch, target: Target) -> list[Config]:
        """Return the finalists of a bucket by quick time, and what they have to beat."""
        known = self._incumbents(target).held
        held = None if known is None else search.representative(known)
        passed = [
            c
            for c in (search.representative(search.defaults[target]), held)
            if c is not None and isinstance(search.screened.get(c), Screened) and search.fits(target, c)
        ]
        return list(dict.fromkeys([*search.best(target, self._top), *passed]))

    async def _confirm(self, search: ClassSearch, config: Config) -> bool:
        """Check a finalist in full, once a class; return whether it passed."""
        key = (search.problem, config)
        if key not in self._confirmed:
            known = search.kept.confirmed(search.searched[0], config)
            self._confirmed[key] = asyncio.ensure_future(_at_once(known) if known else self._evaluator.confirm(*key))
            result = await asyncio.shield(self._confirmed[key])
            if isinstance(result, Failed):
                search.set_screened(config, result, "full", keep=known is None)
            else:
                before = search.screened.get(config)
                resources = before.resources if isinstance(before, Screened) else ()
                search.screened[config] = Screened(result.error, resources)
                if self._env.known_bad is not None:
                    self._env.known_bad.clear(search.problem, config)
            return isinstance(result, Screened)
        return isinstance(await asyncio.shield(self._confirmed[key]), Screened)

    async def _finalists(self, search: ClassSearch, target: Target, but: set[Config]) -> list[Config]:
        """Return finalists that passed the full check and are not among ``but``."""
        while True:
            wanted = [c for c in self._candidates(search, target) if c not in but]
            # Those that were compared before make room for the next best.
            wanted += [c for c in search.best(target, self._top + len(but)) if c not in but and c not in wanted]
            wanted = wanted[: self._top + 2]
            passed = await asyncio.gather(*(self._confirm(search, c) for c in wanted))
            if all(passed):
                return wanted

    async def _bucket(self, search: ClassSearch, target: Target, device: int) -> BucketResult:
        default = search.representative(search.defaults[target])
        entry_held = self._incumbents(target).held
        held = None if entry_held is None else search.representative(entry_held)
        try:
            floor = await self._evaluator.floor_us(target, device)
        except RuntimeError as error:
            return BucketResult(target, None, str(error))
        times: dict[Config, Measurement] = {}
        good: list[Config] = []
        for _ in range(REFILLS):
            finalists = await self._finalists(search, target, set(times))
            if not finalists:
                break
            known = {c: failed for c in finalists if (failed := search.kept.final(target, c)) is not None}
            compared = [c for c in (*finalists, *good) if c not in known]
            fresh = await self._evaluator.finals(target, compared, device) if compared else {}
            times.update({c: known.get(c) or fresh[c] for c in (*finalists, *good)})
            for config in finalists:
                if isinstance(times[config], Failed):
                    search.set_time(target, config, times[config], "finals", keep=config not in known)
            good = [c for c, t in times.items() if not isinstance(t, Failed)]
            waited = any(isinstance(t, Failed) and t.kind in PASSING_KINDS for t in times.values())
            if waited or any(c != default for c in good):
                break
            # All that looked best failed at full size: the next best, against the default again.
        screened = search.screened.get(default)
        if isinstance(screened, Failed) and screened.kind in PASSING_KINDS:
            # Nothing says then that another is not slower.
            return BucketResult(target, None, f"the default had no turn: {screened.message}")
        if not times:
            reasons = {r.message for r in search.screened.values() if isinstance(r, Failed)}
            why = next(iter(sorted(reasons)), "no candidate was tried before the time ran out")
            return BucketResult(target, None, f"no candidate works; the first reason: {why}")
        kept = choose(times, default, held, lambda c: len(self._render(search, c)), self._evaluator.label)
        if kept is None:
            why = next((r.message for r in times.values() if isinstance(r, Failed)), "no time")
            return BucketResult(target, None, f"every finalist failed; the first reason: {why}")
        entry = make_entry(
            target,
            times,
            kept,
            default,
            rendered=self._render(search, kept),
            floor_us=floor,
            error=search.error_of(kept),
            label=self._evaluator.label,
            transferred_from=None if target in search.searched else nearest_anchor(target, search.searched),
            trials=search.tried,
        )
        return BucketResult(target, entry)

    def _render(self, search: ClassSearch, config: Config) -> Sequence[Any]:
        return self._env.render(search.problem, config)


async def _at_once(result: Screening) -> Screening:
    return result


def _beside(target: Target, searched: Sequence[Target]) -> list[Target]:
    """Return the searched buckets next to a bucket, below and above."""
    below = [t for t in searched if t.problem.work <= target.problem.work]
    above = [t for t in searched if t.problem.work >= target.problem.work]
    found = [max(below, key=lambda t: t.problem.work)] if below else []
    return found + ([min(above, key=lambda t: t.problem.work)] if above else [])


def _name(search: ClassSearch) -> str:
    return kind_of(search.problem).group(search.problem)
