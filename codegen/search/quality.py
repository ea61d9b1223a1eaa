"""How close a search comes to trying everything, on one bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bole_codegen.search.environment import Environment
from bole_codegen.search.evaluators import Evaluator
from bole_codegen.search.finish import BucketResult
from bole_codegen.search.results import Failed, Measurement, Screened, Timed
from bole_codegen.search.space import identity, view_all
from bole_codegen.search.targets import Target
from bole_runtime.kernels.space import Config

#: Fastest of everything that are compared with what the search chose, in one run.
TOP = 6


@dataclass(frozen=True)
class Closeness:
    """A search beside an exhaustive one.

    Attributes:
        points: distinct candidates of the bucket.
        failed: of those, candidates that do not count.
        evaluations: candidates that the search tried.
        best: the fastest there is, and its time.
        found: what the search chose, and its time in the same comparison.
    """

    points: int
    failed: int
    evaluations: int
    best: tuple[Config, float]
    found: tuple[Config, float]

    @property
    def gap(self) -> float:
        """How much slower the choice is than the best, as a fraction; 0 when it is the best."""
        return max(0.0, self.found[1] / self.best[1] - 1.0)

    def __str__(self) -> str:
        return (
            f"search: {self.evaluations} of {self.points} candidates ({self.evaluations / self.points:.0%}), "
            f"{self.found[1]:.2f} us with {self.found[0]}; exhaustive: {self.best[1]:.2f} us with {self.best[0]}, "
            f"{self.failed} failed; {self.gap:.1%} slower than the best"
        )


async def exhaustive(
    env: Environment, evaluator: Evaluator, target: Target, also: Sequence[Config], tell: Callable[[int, int], None]
) -> tuple[int, int, dict[Config, Measurement]]:
    """Try every distinct candidate of a bucket and compare the fastest with ``also`` in one run.

    Returns:
        Distinct candidates, how many failed, and final times.
    """
    evaluator.start()
    problem = target.kernels
    distinct: dict[object, Config] = {}
    for config in also:
        distinct.setdefault(identity(problem, config, env.render), config)
    for view in view_all(env.variants(problem.op), target.problem, env.limits, env.seed):
        for config in view.configs:
            distinct.setdefault(identity(problem, config, env.render), config)
    done = 0
    times: dict[Config, float] = {}

    async def one(config: Config) -> None:
        nonlocal done
        screened = await evaluator.screen(problem, config)
        if isinstance(screened, Screened):
            timed = await evaluator.quick(target, config, 0)
            if isinstance(timed, Timed):
                times[config] = timed.median_us
        done += 1
        tell(done, len(distinct))

    await asyncio.gather(*(one(c) for c in distinct.values()))
    failed = len(distinct) - len(times)
    ranked = sorted(times, key=lambda c: (times[c], str(c)))
    good: list[Config] = []
    for config in ranked:
        if len(good) == TOP:
            break
        if isinstance(await evaluator.confirm(problem, config), Failed):
            failed += 1
        else:
            good.append(config)
    finals = await evaluator.finals(target, list(dict.fromkeys([*good, *also])), 0)
    return len(distinct), failed, finals


def compare(
    env: Environment,
    evaluator: Evaluator,
    searched: BucketResult,
    evaluations: int,
    tell: Callable[[int, int], None] = lambda done, of: None,
    loop: asyncio.AbstractEventLoop | None = None,
) -> Closeness:
    """Run the exhaustive search of a bucket that was searched, and say how close the search came.

    Args:
        env: of the search.
        evaluator: of the search; of another loop than one that was closed.
        searched: result of the bucket.
        evaluations: candidates that the search tried.
        tell: called with candidates done and in all.
        loop: event loop, for simulations.

    Raises:
        ValueError: the search found nothing, or nothing works.
    """
    entry = searched.entry
    if entry is None:
        raise ValueError(f"the search found nothing to compare: {searched.reason}")
    found = Config(entry.variant, tuple(entry.params.items()))
    order = {v.name: [p.name for p in v.params] for v in env.variants(entry.op)}[entry.variant]
    found = Config(found.variant, tuple((n, found[n]) for n in order))
    work = exhaustive(env, evaluator, searched.target, [found], tell)
    points, failed, finals = asyncio.run(work) if loop is None else loop.run_until_complete(work)
    good = {c: t.median_us for c, t in finals.items() if isinstance(t, Timed)}
    if found not in good:
        raise ValueError(f"what the search chose failed in the comparison: {finals.get(found)}")
    best = min(good, key=lambda c: (good[c], c != found, str(c)))
    return Closeness(points, failed, evaluations, (best, good[best]), (found, good[found]))


def closeness_json(found: Closeness) -> dict[str, object]:
    """Return a comparison as plain data."""
    return {
        "points": found.points,
        "failed": found.failed,
        "evaluations": found.evaluations,
        "best_us": found.best[1],
        "best": {"variant": found.best[0].variant, "params": found.best[0].as_dict()},
        "found_us": found.found[1],
        "found": {"variant": found.found[0].variant, "params": found.found[0].as_dict()},
        "gap": round(found.gap, 4),
    }
