"""The rounds of one class: candidates are proposed, compiled and checked, and timed where they passed."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from bole_codegen.search.class_search import ClassSearch
from bole_codegen.search.evaluators import Evaluator
from bole_codegen.search.finish import Finisher, Incumbents
from bole_codegen.search.kept import ByTarget
from bole_codegen.search.progress import Progress
from bole_codegen.search.results import Failed, Screened
from bole_codegen.search.targets import Target
from bole_runtime.kernels.space import Config


class Rounds:
    """Evaluates the candidates of classes.

    Args:
        evaluator: measures or predicts.
        finisher: times candidates.
        incumbents: what tables hold.
        progress: what people see.
        rounds: proposals are made in so many steps.
    """

    def __init__(
        self, evaluator: Evaluator, finisher: Finisher, incumbents: Incumbents, progress: Progress, rounds: int
    ) -> None:
        self._evaluator = evaluator
        self._finisher = finisher
        self._incumbents = incumbents
        self._progress = progress
        self._rounds = rounds

    async def defaults(self, search: ClassSearch, device: int) -> None:
        """Screen and time what every bucket is compared with."""
        defaults = list(dict.fromkeys(search.admit(c) for c in search.defaults.values()))
        await side_by_side(self._candidate(search, c, {}, device) for c in defaults)

    async def search(self, search: ClassSearch, ready: asyncio.Future[None], device: int) -> None:
        """Propose, screen and time in rounds."""
        await ready
        search.settle(sorted(search.screened, key=str))
        rounds = self._rounds
        for step in range(rounds):
            share = math.ceil(search.trials * (step + 1) / rounds) - search.tried
            fresh = search.propose(max(0, share))
            bests = search.bests()
            self._progress.phase(f"{search.problem.op} n{search.problem.nodes}: round {step + 1} of {rounds}")
            await side_by_side(self._candidate(search, c, bests, device) for c in fresh)
            # Also those that an earlier run screened and was killed before it timed them.
            known = sorted((c for c, s in search.screened.items() if isinstance(s, Screened)), key=str)
            await side_by_side(self._times(search, c, bests, device) for c in known)
            search.settle([*fresh, *known])

    async def new_entries(self, search: ClassSearch, held: ByTarget, device: int) -> None:
        """Try what a table holds now and did not when the search began, so that nothing better is replaced.

        Args:
            search: the class.
            held: the table's entry of each bucket when the search began, none or one.
            device: where it is timed.
        """
        now = ((t, self._incumbents(t).held) for t in search.searched)
        new = [c for t, c in now if c is not None and c not in held[t] and search.fits(t, c)]
        bests = search.bests()
        await side_by_side(self._candidate(search, search.admit(c), bests, device) for c in dict.fromkeys(new))

    async def _candidate(self, search: ClassSearch, config: Config, bests: dict[Target, float], device: int) -> None:
        """Screen a candidate and time it where it passed."""
        if config not in search.screened:
            # What was found out first: the list of known-bad kernels may have grown since, by a check of finalists.
            before = search.kept.screening(config)
            result = before or search.known_bad(config)
            if result is None:
                kept = config in map(search.representative, search.defaults.values())
                result = await self._evaluator.screen(search.problem, config, kept)
            search.set_screened(config, result, keep=before is None)
            self._progress.screened(config, result)
        if not isinstance(search.screened[config], Failed):
            await self._times(search, config, bests, device)

    async def _times(self, search: ClassSearch, config: Config, bests: dict[Target, float], device: int) -> None:
        for target in search.searched:
            fresh = config not in search.times[target] and search.fits(target, config)
            if fresh and not search.hopeless(target, config, bests):
                await self._finisher.time(search, target, config, device)
                if isinstance(search.screened.get(config), Failed):
                    return


async def side_by_side(work: Any) -> None:
    """Run coroutines side by side; when one fails, give the others up and raise its error."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
