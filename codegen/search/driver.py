"""The run: classes of buckets side by side, rounds of candidates, results.

Each round of a class proposes candidates, compiles and checks them, and times each that passed in the searched buckets.
Several classes are under way at a time, so that compiling processes and the device both have work. The best few of the
searched buckets are timed in the others. Finalists pass a full check and are timed against the analytic default and
the table's entry in one run. Winners of finished classes are tried first in later ones.

What is proposed depends on results alone, never on which of them came first: two runs with equal results agree. A run
that goes on with an interrupted one proposes the same again, and takes from the storage what had been finished.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from bole_codegen.search.beginnings import Beginnings, ClassRun
from bole_codegen.search.claims import BEAT
from bole_codegen.search.class_search import ClassSearch
from bole_codegen.search.deadline import Deadline
from bole_codegen.search.environment import Environment
from bole_codegen.search.evaluators import Evaluator
from bole_codegen.search.finish import BucketResult, Finisher, Incumbents
from bole_codegen.search.ledger import now
from bole_codegen.search.outcome import Options, RunResult
from bole_codegen.search.progress import Progress
from bole_codegen.search.reused import keep, reuse
from bole_codegen.search.rounds import Rounds, side_by_side
from bole_codegen.search.targets import Target, classes
from bole_codegen.search.winners import Winners
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.tables.schema import AnyEntry
from bole_runtime.tables.words import counted

#: Classes under way at a time at most.
ABREAST = 8
OUT_OF_TIME = "the time budget ran out first; the same command goes on from there"


class Driver:
    """Runs the search.

    Args:
        env: what the classes share.
        evaluator: measures or predicts.
        options: how much.
        incumbents: configurations that tables suggest for a bucket.
        save: called with the entries of each finished class.
        progress: what people see.
        begun: when the budget began, on the clock of the loop; default, when :meth:`run` is called.
    """

    def __init__(
        self,
        env: Environment,
        evaluator: Evaluator,
        options: Options,
        incumbents: Incumbents,
        save: Callable[[list[AnyEntry]], None],
        progress: Progress,
        begun: float | None = None,
    ) -> None:
        self._env = env
        self._evaluator = evaluator
        self._options = options
        self._save = save
        self._progress = progress
        self._deadline = Deadline(evaluator.label, begun or 0.0, options.time_budget, options.write_up)
        self._begun = begun
        self._finisher = Finisher(env, evaluator, options.top, incumbents, progress)
        self._rounds = Rounds(evaluator, self._finisher, incumbents, progress, options.rounds)
        self._winners = Winners()
        self._beginnings = Beginnings(env, options, incumbents, self._winners)
        self._active = [0] * evaluator.devices
        self._todo: list[ClassRun] = []
        self._abreast = 1
        self._late = self._aside = False
        self.result = RunResult()

    @property
    def environment(self) -> Environment:
        """What the classes share."""
        return self._env

    def run(self, targets: Sequence[Target], loop: asyncio.AbstractEventLoop | None = None) -> RunResult:
        """Search every target. On an interrupt, :attr:`result` holds what was finished.

        Args:
            targets: buckets.
            loop: event loop, for simulations with a clock of their own.

        Raises:
            StorageError: it was to start anew, and another run is at work; or such a one deleted what this one had; or
                the storage cannot be used any more.
        """
        self._env.store.ask.note = self._progress.note
        self._env.store.begin(targets)
        try:
            if loop is None:
                self._aside = True
                asyncio.run(self._main(targets))
            else:
                loop.run_until_complete(self._main(targets))
        finally:
            self._progress.end()
            try:
                # Before claims are given up: the next run must find what was finished.
                self._env.store.flush()
            except BaseException:
                self._env.store.ask.stop()
                raise
            finally:
                with contextlib.suppress(Exception):
                    self._env.store.claims.release_all()
        return self.result

    async def _main(self, targets: Sequence[Target]) -> None:
        if self._begun is None:
            self._begun = self._deadline.begun = now()
        options = self._options
        todo = self._todo
        ordered = classes(targets)
        # Enough classes at a time to keep every compiling process busy.
        share = 4 * self._evaluator.workers * options.rounds / options.trials
        self._abreast = max(1 + self._evaluator.devices, min(ABREAST, math.ceil(share)))
        for i, (problem, members) in enumerate(ordered.items()):
            if not await self._reuse(problem, members):
                # Counted over all classes, those that an earlier run finished included: it knew no other winners.
                earlier = frozenset(list(ordered)[: max(0, i - self._abreast + 1)])
                todo.append(ClassRun(problem, members, earlier))
                # For all classes before any begins: a table that is written on the way must not decide later.
                await self._stored(self._beginnings.plan, todo[-1])
        ahead = sum(len(c.members) for c in todo)
        self._progress.begin(len(todo), ahead, len(todo) * options.trials, len(self.result.buckets))
        self._evaluator.start()
        beat = asyncio.ensure_future(self._beat())
        work = asyncio.ensure_future(self._everything(todo))
        try:
            # A run that can give no sign of life must end before others take its classes for theirs.
            first = asyncio.FIRST_COMPLETED
            done_now, _ = await asyncio.wait({work, beat}, timeout=self._deadline.left(), return_when=first)
            self._late |= not done_now
            for task in done_now:
                await task
        finally:
            if not work.done() or work.cancelled() or work.exception():
                # It ends early: what still waits for the storage must not make others wait.
                self._env.store.ask.stop()
            work.cancel()
            beat.cancel()
            await asyncio.gather(work, beat, return_exceptions=True)
            self._close()

    def _close(self) -> None:
        """Take what unfinished classes have, and count."""
        assert self._begun is not None
        for one in self._todo:
            if not one.taken:
                found = {r.target for r in one.results}
                missing = [BucketResult(t, None, OUT_OF_TIME) for t in one.members if t not in found]
                self._take(one.problem, [*one.results, *(missing if self._late else ())])
            if one.search is not None:
                self.result.count(one.search)
        self.result.out_of_time = self._late
        self.result.seconds = now() - self._begun
        self.result.spent = self._evaluator.ledger.report(self.result.seconds)
        if self._env.known_bad is not None:
            self._env.known_bad.save()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            await self._stored(self._env.store.claims.beat)

    async def _stored(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do what may have to wait for the storage: aside, since workers want answers meanwhile."""
        return await asyncio.to_thread(work, *args) if self._aside else work(*args)

    async def _everything(self, todo: list[ClassRun]) -> None:
        ends = {one.problem: asyncio.Event() for one in todo}
        others: list[ClassRun] = []

        async def in_turn(one: ClassRun) -> None:
            # Starts when those that far before it have ended: which winners it knows must not depend on chance.
            for before in one.earlier & ends.keys():
                await ends[before].wait()
            if await self._stored(self._env.store.claims.take, self._env.store.class_name(one.problem)):
                await self._class(one)
            else:
                others.append(one)
            # Not after an error, which ends the run: those that wait must not begin, and keep a plan, without it.
            ends[one.problem].set()

        await side_by_side(in_turn(one) for one in todo)
        if others:
            groups = counted(len(others), "group of buckets", "groups of buckets")
            self._progress.note(f"another run on this storage searches {groups}: waiting for it")
        await side_by_side(self._wait_for(one) for one in others)

    async def _wait_for(self, one: ClassRun) -> None:
        """Take the results of a class that another run searches, or search it when that run is gone."""
        claims, name = self._env.store.claims, self._env.store.class_name(one.problem)
        while True:
            if await self._reuse(one.problem, one.members):
                one.taken = True
                return
            if await self._stored(claims.take, name):
                await self._class(one)
                return
            await asyncio.sleep(1.0)

    async def _reuse(self, problem: Specialisation, members: Sequence[Target]) -> bool:
        """Take a class that an earlier run finished, with what it tried; return whether there is one."""
        options = self._options
        found = await self._stored(reuse, self._env, problem, members, options.trials, options.anchors)
        if found is None:
            return False
        self.result.searches.append(found.search)
        self.result.count(found.search)
        self.result.bandwidth_gbs = found.bandwidth_gbs or self.result.bandwidth_gbs
        self._take(problem, found.results)
        return True

    async def _class(self, one: ClassRun) -> None:
        """Search one class and finish its buckets."""
        one.begun = True
        options = self._options
        plan = await self._stored(self._beginnings.plan, one)
        try:
            search = await self._stored(
                ClassSearch.open, self._env, one.problem, one.members, options.trials, options.anchors, plan.before
            )
        except ValueError as error:
            one.taken = True
            self._take(one.problem, [BucketResult(t, None, str(error)) for t in one.members])
            return
        one.search = search
        self.result.searches.append(search)
        device = min(range(len(self._active)), key=self._active.__getitem__)
        self._active[device] += 1
        try:
            begun = now()
            ready = asyncio.ensure_future(self._prepare(search, one))
            await self._rounds.defaults(search, device)
            self._deadline.defaults.append(now() - begun)
            whole = await self._for(self._rounds.search(search, ready, device), self._share())
            if not whole:
                search.adopt_rest()
            else:
                await self._rounds.new_entries(search, plan.held, device)
            begun = now()
            await self._finisher.finish(search, device, one.results.append)
            self._deadline.finished.append((now() - begun) / len(one.members) / self._active[device])
        finally:
            self._active[device] -= 1
        store, name = self._env.store, self._env.store.class_name(one.problem)
        if not await self._stored(store.claims.holds, name):
            # It was silent for so long that another run took over, whose results count for all.
            await self._stored(store.claims.release, name)
            self.result.searches.remove(search)
            one.search, one.results = None, []
            await self._wait_for(one)
            return
        # One whose candidates did not all have their turn is not finished: the next run tries those again.
        if whole and search.complete():
            # Before the table has it: one that is killed in between must not meet its own entries as those of others.
            bandwidth = self._evaluator.bandwidth_gbs
            await self._stored(keep, self._env, search, one.results, options.trials, bandwidth)
        one.taken = True
        self._take(one.problem, one.results)
        if self._env.known_bad is not None:
            self._env.known_bad.save()
        await self._stored(store.flush)
        await self._stored(store.claims.release, name)

    def _share(self) -> float | None:
        """Return the seconds that a class may search for, None without a budget."""
        open_ = [c for c in self._todo if not c.taken]
        ahead = sum(not c.begun for c in open_)
        sizes = [len(c.members) for c in open_]
        return self._deadline.share(sizes, ahead, self._abreast, self._evaluator.workers, self._evaluator.devices)

    async def _for(self, work: Coroutine[Any, Any, None], seconds: float | None) -> bool:
        """Work for some seconds at most; return whether it was finished."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task}, timeout=seconds)
            if not task.done():
                self._late = True
                return False
            await task
            return True
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _prepare(self, search: ClassSearch, one: ClassRun) -> None:
        """Find out what can be proposed, while the default compiles."""
        # Late, classes that the budget cut short are among those with winners: the next run decides.
        first = self._beginnings.first(one, keep=not self._late)
        if self._aside:  # It takes a second, in which workers want answers.
            await asyncio.to_thread(search.prepare, first)
        else:
            search.prepare(first)

    def _take(self, problem: Specialisation, results: Sequence[BucketResult]) -> None:
        """Add finished buckets to the result and to the table."""
        self.result.buckets += results
        entries = [r.entry for r in results if r.entry is not None]
        for entry in entries:
            # In the declared order: entries from a storage name their parameters in another one.
            config = next(v for v in self._env.variants(entry.op) if v.name == entry.variant).config(entry.params)
            self._winners.add(problem, entry.work, config)
        if entries:
            self._save(entries)
