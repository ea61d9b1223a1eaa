"""The end of a class: neighbours, finalists, table entries; and results that an earlier run finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bole_codegen.search.choose import choose, make_entry
from bole_codegen.search.class_search import ClassSearch, Environment
from bole_codegen.search.evaluators import Evaluator, Stop
from bole_codegen.search.progress import Progress
from bole_codegen.search.results import Failed, Measurement, Screened
from bole_codegen.search.targets import Target, nearest_anchor
from bole_runtime.kernels.space import Config
from bole_runtime.tables.schema import Entry

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
    entry: Entry | None
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

    def time(self, search: ClassSearch, target: Target, configs: Sequence[Config], stop: Stop) -> None:
        """Time candidates of a bucket, cheaply."""
        if not configs:
            return
        self._progress.phase(f"timing {len(configs)} candidates in {target.problem.key()}")

        def timed(config: Config, result: Any) -> None:
            search.set_time(target, config, result)
            self._progress.timed(target, config, result)

        self._evaluator.quick(target, configs, timed, stop)

    def finish(self, search: ClassSearch) -> list[BucketResult]:
        """Return the result of every bucket of a class."""
        results = []
        for target in search.members:
            result = self._bucket(search, target)
            results.append(result)
            entry = result.entry
            times = (None, None) if entry is None else (entry.median_us, entry.default_us)
            self._progress.finished(target, *times)
        return results

    def _finalists(self, search: ClassSearch, target: Target) -> tuple[list[Config], Target | None]:
        if target in search.searched:
            return search.best(target, self._top), None
        source = nearest_anchor(target, search.searched)
        found = list(dict.fromkeys(c for t in _beside(target, search.searched) for c in search.best(t, self._top)))
        found = [c for c in found if search.reason(target, c) is None and c not in search.times[target]]
        self.time(search, target, found, lambda: False)
        return search.best(target, self._top), source

    def _bucket(self, search: ClassSearch, target: Target) -> BucketResult:
        default = search.representative(search.defaults[target])
        known = self._incumbents(target).held
        held = None if known is None else search.representative(known)
        finalists, source = self._finalists(search, target)
        passed = [
            c
            for c in (default, held)
            if c is not None and isinstance(search.screened.get(c), Screened) and search.reason(target, c) is None
        ]
        finalists = list(dict.fromkeys([*finalists, *passed]))
        if not finalists:
            reasons = {r.message for r in search.screened.values() if isinstance(r, Failed)}
            why = next(iter(sorted(reasons)), "no candidate was tried before the time ran out")
            return BucketResult(target, None, f"no candidate works; the first reason: {why}")
        try:
            floor = self._evaluator.floor_us(target)
        except RuntimeError as error:
            return BucketResult(target, None, str(error))
        times: dict[Config, Measurement] = {}
        for _ in range(REFILLS):
            self._progress.phase(f"comparing {len(finalists)} finalists in {target.problem.key()}")
            times.update(self._evaluator.finals(target, finalists))
            for config in finalists:
                if isinstance(times[config], Failed):
                    search.set_time(target, config, times[config])
            good = [c for c, t in times.items() if not isinstance(t, Failed)]
            more = [c for c in search.best(target, self._top + len(times)) if c not in times]
            if any(c != default for c in good) or not more:
                break
            # All that looked best failed at full size: the next best, against the default again.
            finalists = [*more[: self._top], *good]
        chosen = choose(times, default, held, lambda c: len(self._render(search, c)))
        if chosen is None:
            why = next((r.message for r in times.values() if isinstance(r, Failed)), "no time")
            return BucketResult(target, None, f"every finalist failed; the first reason: {why}")
        entry = make_entry(
            target,
            times,
            chosen,
            default,
            rendered=self._render(search, chosen),
            floor_us=floor,
            error=search.error_of(chosen),
            label=self._evaluator.label,
            transferred_from=source,
            trials=search.tried,
        )
        return BucketResult(target, entry)

    def _render(self, search: ClassSearch, config: Config) -> Sequence[Any]:
        return self._env.render(search.problem, config)


def keep(env: Environment, results: Sequence[BucketResult], trials: int) -> None:
    """Remember finished buckets, so that the same run need not do them again."""
    for result in results:
        if result.entry is not None and not result.reused:
            env.store.set_final(result.target, {"trials": trials, "entry": msgspec.to_builtins(result.entry)})


def reuse(env: Environment, members: Sequence[Target], trials: int) -> list[BucketResult] | None:
    """Return the results of a class that an earlier run finished, None when any bucket is missing or out of date.

    Args:
        env: of the run.
        members: buckets of the class.
        trials: candidates that this run would try; an earlier run with fewer does not count.
    """
    found: list[BucketResult] = []
    for target in members:
        data = env.store.final(target)
        if data is None:
            return None
        try:
            entry = msgspec.convert(data.get("entry"), Entry)
            config = next(v.config(entry.params) for v in env.variants(entry.op) if v.name == entry.variant)
            texts = [k.text_hash for k in env.render(target.problem, config)]
        except (msgspec.MsgspecError, ValueError, StopIteration):
            return None
        if entry.problem() != target.problem or texts != [k.text_hash for k in entry.kernels]:
            return None
        if not isinstance(data.get("trials"), int) or data["trials"] < trials:
            return None
        found.append(BucketResult(target, entry, reused=True))
    return found


def _beside(target: Target, searched: Sequence[Target]) -> list[Target]:
    """Return the searched buckets next to a bucket, below and above."""
    below = [t for t in searched if t.problem.work <= target.problem.work]
    above = [t for t in searched if t.problem.work >= target.problem.work]
    found = [max(below, key=lambda t: t.problem.work)] if below else []
    return found + ([min(above, key=lambda t: t.problem.work)] if above else [])
