"""How close a search comes to trying everything, on one bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from bole_codegen.search.deadline import CONFIRM_GUESS, FINISH_GUESS
from bole_codegen.search.environment import Environment
from bole_codegen.search.evaluators import Evaluator
from bole_codegen.search.finish import BucketResult
from bole_codegen.search.ledger import now
from bole_codegen.search.results import Failed, Measurement, Screened, Timed
from bole_codegen.search.space import identity, view_all
from bole_codegen.search.targets import Target
from bole_runtime.kernels.space import Config
from bole_runtime.tables.words import counted

#: Fastest of everything that are compared with what the search chose, in one run.
TOP = 6
#: Candidates under way beside those that compile.
AHEAD = 4


@dataclass(frozen=True)
class Closeness:
    """A search beside an exhaustive one.

    Attributes:
        points: distinct candidates of the bucket.
        failed: of those, candidates that do not count.
        evaluations: candidates that the search tried.
        best: the fastest there is, and its time.
        found: what the search chose, and its time in the same comparison.
        tried: of the points, those that there was time for.
    """

    points: int
    failed: int
    evaluations: int
    best: tuple[Config, float]
    found: tuple[Config, float]
    tried: int

    @property
    def out_of_time(self) -> bool:
        """Whether a time budget ended it before everything was tried."""
        return self.tried < self.points

    @property
    def gap(self) -> float:
        """How much slower the choice is than the best, as a fraction; 0 when it is the best."""
        return max(0.0, self.found[1] / self.best[1] - 1.0)

    def __str__(self) -> str:
        part = f" (the time budget ended it after {self.tried} of {self.points})" if self.out_of_time else ""
        best = "the best of those tried" if part else "the best"
        return (
            f"search: {self.evaluations} of {counted(self.points, 'candidate')} "
            f"({self.evaluations / self.points:.0%}), {self.found[1]:.2f} us with {self.found[0]}; "
            f"exhaustive{part}: {self.best[1]:.2f} us with {self.best[0]}, {self.failed} failed; "
            f"{self.gap:.1%} slower than {best}"
        )


@dataclass(frozen=True)
class Everything:
    """What came of trying everything.

    Attributes:
        points: distinct candidates.
        tried: of those, how many had their turn.
        failed: of those tried, how many do not count.
        finals: final times.
    """

    points: int
    tried: int
    failed: int
    finals: dict[Config, Measurement]


async def exhaustive(
    env: Environment,
    evaluator: Evaluator,
    target: Target,
    also: Sequence[Config],
    tell: Callable[[int, int], None],
    seconds: float | None = None,
) -> Everything:
    """Try every distinct candidate of a bucket, those of ``also`` first, and compare the fastest with them in one run.

    Args:
        env: of the search.
        evaluator: of the search.
        target: the bucket.
        also: what the search chose.
        tell: called with candidates done and in all.
        seconds: for trying, after which the rest has no turn; None for as long as it takes.
    """
    begun = now()
    evaluator.start()
    problem = target.kernels
    distinct: dict[object, Config] = {}
    for config in also:
        distinct.setdefault(identity(problem, config, env.render), config)
    for view in view_all(env.variants(problem.op), target.problem, env.limits, env.seed):
        for i, config in enumerate(view.configs):
            distinct.setdefault(identity(problem, config, env.render), config)
            if i % 64 == 0:  # All are rendered, which takes long: a time limit must be able to end it.
                await asyncio.sleep(0)
    done = 0
    times: dict[Config, float] = {}

    # Enough to keep every process busy, and no more: what is queued when the time ends would go before the finalists.
    turn = asyncio.Semaphore(evaluator.workers + AHEAD)

    async def one(config: Config) -> None:
        nonlocal done
        async with turn:
            screened = await evaluator.screen(problem, config)
            if isinstance(screened, Screened):
                timed = await evaluator.quick(target, config, 0)
                if isinstance(timed, Timed):
                    times[config] = timed.median_us
        done += 1
        tell(done, len(distinct))

    left = None if seconds is None else max(0.0, seconds - (now() - begun))
    await within(left, [one(c) for c in distinct.values()])
    tried = done
    failed = tried - len(times)
    ranked = sorted(times, key=lambda c: (times[c], str(c)))
    good: list[Config] = []
    while ranked and len(good) < TOP:
        wanted = TOP - len(good)
        some, ranked = ranked[:wanted], ranked[wanted:]
        results = await asyncio.gather(*(evaluator.confirm(problem, config) for config in some))
        good += [c for c, result in zip(some, results, strict=True) if not isinstance(result, Failed)]
        failed += sum(isinstance(result, Failed) for result in results)
    finals = await evaluator.finals(target, list(dict.fromkeys([*good, *also])), 0)
    return Everything(len(distinct), tried, failed, finals)


async def within(seconds: float | None, work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Work side by side for some seconds at most; what is not done by then is given up.

    Raises:
        Exception: the first that any of the work raised.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def compare(
    env: Environment,
    evaluator: Evaluator,
    searched: BucketResult,
    evaluations: int,
    tell: Callable[[int, int], None] = lambda done, of: None,
    loop: asyncio.AbstractEventLoop | None = None,
    seconds: float | None = None,
) -> Closeness:
    """Run the exhaustive search of a bucket that was searched, and say how close the search came.

    Args:
        env: of the search.
        evaluator: of the search; of another loop than one that was closed.
        searched: result of the bucket.
        evaluations: candidates that the search tried.
        tell: called with candidates done and in all.
        loop: event loop, for simulations.
        seconds: that all of it may take, None for no limit. Of them some are kept to compare the fastest.

    Raises:
        ValueError: the search found nothing, nothing works, or the time was not enough to compare anything.
    """
    entry = searched.entry
    if entry is None:
        raise ValueError(f"the search found nothing to compare: {searched.reason}")
    found = Config(entry.variant, tuple(entry.params.items()))
    order = {v.name: [p.name for p in v.params] for v in env.variants(entry.op)}[entry.variant]
    found = Config(found.variant, tuple((n, found[n]) for n in order))
    trying = seconds
    if seconds is not None:
        # Twice: what compiles when the time ends goes before the finalists.
        kept = 2 * CONFIRM_GUESS[evaluator.label] + FINISH_GUESS[evaluator.label]
        trying = max(0.0, seconds - min(kept, 0.5 * seconds))
    work = asyncio.wait_for(exhaustive(env, evaluator, searched.target, [found], tell, trying), seconds)
    try:
        all_ = asyncio.run(work) if loop is None else loop.run_until_complete(work)
    except (TimeoutError, asyncio.TimeoutError):
        raise ValueError("the time budget ended before the fastest were compared; give it longer") from None
    good = {c: t.median_us for c, t in all_.finals.items() if isinstance(t, Timed)}
    if found not in good:
        raise ValueError(f"what the search chose failed in the comparison: {all_.finals.get(found)}")
    best = min(good, key=lambda c: (good[c], c != found, str(c)))
    return Closeness(all_.points, all_.failed, evaluations, (best, good[best]), (found, good[found]), all_.tried)


def closeness_json(found: Closeness) -> dict[str, object]:
    """Return a comparison as plain data."""
    return {
        "points": found.points,
        "tried": found.tried,
        "out_of_time": found.out_of_time,
        "failed": found.failed,
        "evaluations": found.evaluations,
        "best_us": found.best[1],
        "best": {"variant": found.best[0].variant, "params": found.best[0].as_dict()},
        "found_us": found.found[1],
        "found": {"variant": found.found[0].variant, "params": found.found[0].as_dict()},
        "gap": round(found.gap, 4),
    }
