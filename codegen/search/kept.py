"""What earlier runs found out about a class: the plan that they searched by, and their evaluations.

A search is a function of its plan and of what evaluations give. So an interrupted one goes on by doing the same again
from the beginning, where each evaluation that was finished is answered from the storage: it proposes what it would have
proposed undisturbed. Telling samplers everything at once would not do, since they had known less in the rounds before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bole_codegen.search.results import Failed, Measurement, Screened, Screening
from bole_codegen.search.store import Record, Store
from bole_codegen.search.targets import Target
from bole_runtime.kernels.space import Config, Variant

#: Buckets to configurations.
ByTarget = Mapping[Target, Sequence[Config]]


@dataclass(frozen=True)
class Plan:
    """What the search of a class depends on, besides the declared space and what evaluations give.

    Attributes:
        options: numbers of the run: trials, rounds, searched buckets, seed.
        held: the table's entry of each bucket when the run began, none or one. The run itself writes tables.
        near: entries of other buckets or related GPUs then, nearest first.
        warm: what to try first, by bucket; None before the class has begun.
        before: evaluations of a bucket that were there before this search, which it knew from the beginning.
    """

    options: tuple[int, ...]
    held: ByTarget
    near: ByTarget
    warm: ByTarget | None = None
    before: tuple[int, ...] = ()

    @classmethod
    def read(
        cls, store: Store, members: Sequence[Target], variants: Iterable[Variant], options: tuple[int, ...]
    ) -> Plan | None:
        """Return the plan of an interrupted search with these options, None when there is none that can be used.

        Args:
            store: finished evaluations.
            members: buckets of the class.
            variants: declared.
            options: numbers of this run.
        """
        data = store.plan(members[0])
        by_name = {v.name: v for v in variants}

        def configs(part: Any) -> ByTarget:
            return {t: tuple(by_name[n].config(p) for n, p in part[t.problem.key()]) for t in members}

        try:
            if data is None or tuple(data["options"]) != options:
                return None
            warm = data.get("warm")
            before = tuple(int(data["before"][t.problem.key()]) for t in members)
            warm = None if warm is None else configs(warm)
            return cls(options, configs(data["held"]), configs(data["near"]), warm, before)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return None  # Of other buckets, or edited.

    @classmethod
    def make(
        cls, store: Store, members: Sequence[Target], options: tuple[int, ...], held: ByTarget, near: ByTarget
    ) -> Plan:
        """Return a new plan, which knows all evaluations that there are, and keep it."""
        plan = cls(options, held, near, before=tuple(store.count(t) for t in members))
        plan.write(store, members)
        return plan

    def begin(self, store: Store, members: Sequence[Target], warm: ByTarget) -> None:
        """Keep the plan with what to try first."""
        replace(self, warm=warm).write(store, members)

    def write(self, store: Store, members: Sequence[Target]) -> None:
        """Keep the plan in the storage."""

        def plain(part: ByTarget) -> dict[str, Any]:
            return {t.problem.key(): [[c.variant, c.as_dict()] for c in part[t]] for t in members}

        data = {
            "options": list(self.options),
            "held": plain(self.held),
            "near": plain(self.near),
            "warm": None if self.warm is None else plain(self.warm),
            "before": {t.problem.key(): n for t, n in zip(members, self.before, strict=True)},
        }
        store.set_plan(members[0], data)


class Kept:
    """Evaluations that an interrupted search had finished, as answers to the same questions.

    Args:
        store: finished evaluations.
        members: buckets of the class.
        before: evaluations of each bucket that the search knew from the beginning.
        texts: text hashes of the kernels of a configuration today; a record of others answers nothing.
    """

    def __init__(
        self,
        store: Store,
        members: Sequence[Target],
        before: Sequence[int],
        texts: Callable[[Config], tuple[str, ...]],
    ) -> None:
        self._texts = texts
        self._before: list[tuple[Target, Record]] = []
        self._later: dict[Config, list[tuple[Target, Record]]] = {}
        for target, count in zip(members, before, strict=True):
            for number, record in store.load(target):
                if number < count:
                    self._before.append((target, record))
                else:
                    self._later.setdefault(record.config, []).append((target, record))

    @property
    def before(self) -> Sequence[tuple[Target, Record]]:
        """What the search knew from the beginning, whatever its text."""
        return self._before

    def rest(self) -> list[tuple[Target, Record]]:
        """Return every other record, whatever its text."""
        return [r for records in self._later.values() for r in records]

    def screening(self, config: Config) -> Screening | None:
        """Return what the first check gave, None when it is not known."""
        records = [r for _, r in self._of(config)]
        for record in records:
            if record.stage == "check" and isinstance(record.outcome, Failed):
                return record.outcome
        # What was timed had passed, also where it failed later on.
        return next((Screened(r.error) for r in records if r.stage == "time"), None)

    def time(self, target: Target, config: Config) -> Measurement | None:
        """Return a quick time in a bucket, None when it is not known."""
        return self._first(target, config, "time")

    def confirmed(self, target: Target, config: Config) -> Failed | None:
        """Return how the full check failed, None when it did not or has not been made."""
        found = self._first(target, config, "full")
        return found if isinstance(found, Failed) else None

    def final(self, target: Target, config: Config) -> Failed | None:
        """Return how a finalist failed in the comparison of a bucket, None when it did not or was not in it."""
        found = self._first(target, config, "finals")
        return found if isinstance(found, Failed) else None

    def _first(self, target: Target, config: Config, stage: str) -> Measurement | None:
        return next((r.outcome for t, r in self._of(config) if t == target and r.stage == stage), None)

    def _of(self, config: Config) -> list[tuple[Target, Record]]:
        records = self._later.get(config, [])
        if not records:
            return []
        texts = self._texts(config)
        return [(t, r) for t, r in records if r.texts == texts]
