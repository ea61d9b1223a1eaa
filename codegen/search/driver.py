"""The run: classes of buckets in waves, rounds of candidates, results.

Each round proposes candidates for every class of a wave, screens them all in parallel, then times those that passed
in the searched buckets. The best few of the nearest searched bucket are timed in the others. Finalists are timed
against the analytic default and the table's entry in one run. Winners of a wave are tried first in the next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bole_codegen.search.class_search import ClassSearch, Environment
from bole_codegen.search.evaluators import Evaluator, Stop
from bole_codegen.search.finish import BucketResult, Finisher, Incumbents, keep, reuse
from bole_codegen.search.progress import Progress
from bole_codegen.search.results import Screened, Timed
from bole_codegen.search.targets import Target, classes
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config
from bole_runtime.tables.schema import Entry

#: Part of the time budget that goes to finding candidates; the rest compares finalists.
SEARCH_SHARE = 0.7
#: Winners of related classes that a bucket tries first.
WARM = 4


@dataclass(frozen=True)
class Options:
    """How much to search.

    Attributes:
        trials: candidates a class.
        anchors: searched buckets a class.
        top: finalists a bucket, the default and the table's entry not counted.
        rounds: proposals are made in so many steps, each knowing the results of those before.
        time_budget: seconds for the whole run, None for no limit.
    """

    trials: int = 40
    anchors: int = 3
    top: int = 4
    rounds: int = 4
    time_budget: float | None = None


@dataclass
class RunResult:
    """The end of a run, or what there was of it when it was interrupted.

    Attributes:
        buckets: results, in the order in which they were finished.
        failures: candidates that failed, by kind.
        searches: classes that were searched, with their histories.
        tried: candidates compiled and checked, those of earlier runs included.
        resumed: evaluations taken over from earlier runs.
        duplicates: candidates that rendered to kernels already tried.
        out_of_time: whether the budget ended the search.
        seconds: wall time.
    """

    buckets: list[BucketResult] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    searches: list[ClassSearch] = field(default_factory=list)
    tried: int = 0
    resumed: int = 0
    duplicates: int = 0
    out_of_time: bool = False
    seconds: float = 0.0

    @property
    def entries(self) -> list[Entry]:
        """Entries of every finished bucket."""
        return [b.entry for b in self.buckets if b.entry is not None]


class Driver:
    """Runs the search.

    Args:
        env: what the classes share.
        evaluator: measures or predicts.
        options: how much.
        incumbents: configurations that tables suggest for a bucket.
        save: called with the entries of each finished class.
        progress: what people see.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        env: Environment,
        evaluator: Evaluator,
        options: Options,
        incumbents: Incumbents,
        save: Callable[[list[Entry]], None],
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._env = env
        self._evaluator = evaluator
        self._options = options
        self._incumbents = incumbents
        self._save = save
        self._progress = progress
        self._clock = clock
        self._begin = clock()
        self._finisher = Finisher(env, evaluator, options.top, incumbents, progress)
        self._winners: dict[Problem, list[tuple[int, Config]]] = {}
        self.result = RunResult()

    def run(self, targets: Sequence[Target]) -> RunResult:
        """Search every target. On an interrupt, :attr:`result` holds what was finished."""
        options = self._options
        todo: list[tuple[Problem, tuple[Target, ...]]] = []
        for problem, members in classes(targets).items():
            done = reuse(self._env, members, options.trials)
            if done is None:
                todo.append((problem, members))
            else:
                self._take(problem, done)
        ahead = sum(len(members) for _, members in todo)
        self._progress.begin(len(todo), ahead, len(todo) * options.trials, len(self.result.buckets))
        # Enough classes at a time to keep every compiling process busy.
        wave = max(1, min(8, math.ceil(4 * self._evaluator.workers * options.rounds / options.trials)))
        try:
            for i in range(0, len(todo), wave):
                share = None
                if options.time_budget is not None:
                    left = max(0.0, options.time_budget - (self._clock() - self._begin))
                    share = left * min(wave, len(todo) - i) / (len(todo) - i)
                self._wave(todo[i : i + wave], share)
        finally:
            self.result.seconds = self._clock() - self._begin
            self._progress.end()
        return self.result

    def _take(self, problem: Problem, results: list[BucketResult]) -> None:
        """Add finished buckets to the result and to the table."""
        self.result.buckets += results
        entries = [r.entry for r in results if r.entry is not None]
        for entry in entries:
            config = Config(entry.variant, tuple(entry.params.items()))
            self._winners.setdefault(problem, []).append((entry.work, config))
        if entries:
            self._save(entries)

    def _stopper(self, seconds: float | None) -> Stop:
        if seconds is None:
            return lambda: False
        until = self._clock() + seconds
        return lambda: self._clock() >= until

    def _wave(self, groups: Sequence[tuple[Problem, tuple[Target, ...]]], seconds: float | None) -> None:
        stop = self._stopper(None if seconds is None else seconds * SEARCH_SHARE)
        searches: list[ClassSearch] = []
        for problem, members in groups:
            warm = {t: self._warm(t) for t in members}
            try:
                search = ClassSearch.open(
                    self._env, problem, members, self._options.trials, self._options.anchors, warm
                )
            except ValueError as error:
                self.result.buckets += [BucketResult(t, None, str(error)) for t in members]
                continue
            searches.append(search)
            self.result.searches.append(search)
            self.result.resumed += search.resumed
        for step in range(self._options.rounds):
            if not self._round(searches, step, stop):
                break
        late = stop()
        self.result.out_of_time = self.result.out_of_time or late
        for search in searches:
            results = self._finisher.finish(search)
            self._take(search.problem, results)
            self._count(search)
            if not late:
                keep(self._env, results, self._options.trials)

    def _round(self, searches: Sequence[ClassSearch], step: int, stop: Stop) -> bool:
        """Propose, screen and time once; return whether to go on."""
        rounds = self._options.rounds
        lists = []
        for search in searches:
            share = math.ceil(search.trials * (step + 1) / rounds) - search.tried
            lists.append([(search, c) for c in search.propose(max(0, share))])
        jobs: list[tuple[ClassSearch, Config]] = []
        # In turn, so that a budget that runs out leaves every class with something.
        for i in range(max((len(x) for x in lists), default=0)):
            jobs += [x[i] for x in lists if i < len(x)]
        if jobs:
            self._progress.phase(f"round {step + 1} of {rounds}: compiling and checking {len(jobs)} candidates")

        def screened(i: int, result: Any) -> None:
            search, config = jobs[i]
            search.set_screened(config, result)
            self._progress.screened(config, result)

        self._evaluator.screen([(s.problem, c) for s, c in jobs], screened, _patient(searches, stop))
        for search in searches:
            for target in search.searched:
                timed = any(isinstance(r, Timed) for r in search.times[target].values())
                self._finisher.time(search, target, search.to_time(target), stop if timed else lambda: False)
        return not stop()

    def _count(self, search: ClassSearch) -> None:
        self.result.tried += search.tried
        self.result.duplicates += search.duplicates
        for kind, count in search.failures().items():
            self.result.failures[kind] = self.result.failures.get(kind, 0) + count

    def _warm(self, target: Target) -> list[Config]:
        """Return what to try first: the table's entry, winners of the most similar classes, entries of near buckets."""
        hints = self._incumbents(target)
        problem = target.problem
        fields = ("dk", "dv", "group", "in_dtype", "state_dtype", "gate_mode", "precision", "nodes", "pending")

        def distance(other: Problem) -> int:
            return sum(getattr(problem, f) != getattr(other, f) for f in fields)

        near = sorted((p for p in self._winners if p.op == problem.op), key=lambda p: (distance(p), p))[:3]
        found: list[Config] = []
        for other in near:
            by_work = sorted(self._winners[other], key=lambda w: (abs(math.log2(w[0] / problem.work)), -w[0]))
            found += [config for _, config in by_work[:2]]
        held = [] if hints.held is None else [hints.held]
        return list(dict.fromkeys([*held, *found, *hints.near]))[: WARM + 1]


def _patient(searches: Sequence[ClassSearch], stop: Stop) -> Stop:
    """Return a stop that waits until every class has at least one candidate that passed."""

    def done() -> bool:
        return stop() and all(any(isinstance(r, Screened) for r in s.screened.values()) for s in searches)

    return done
