"""What the search of a class of buckets begins with: its plan, which a storage keeps, and what it tries first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bole_codegen.search.class_search import ClassSearch
from bole_codegen.search.environment import Environment
from bole_codegen.search.finish import BucketResult, Incumbents
from bole_codegen.search.kept import Plan
from bole_codegen.search.outcome import Options
from bole_codegen.search.targets import Target
from bole_codegen.search.winners import Winners
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config


@dataclass
class ClassRun:
    """A class on its way through a run.

    Attributes:
        problem: representative.
        members: its buckets.
        earlier: classes whose winners it may begin with.
        plan: what its search depends on.
        search: its search, once it has begun.
        results: its finished buckets.
        begun: whether it is searched, or was.
        taken: whether its results are in the result of the run.
    """

    problem: Specialisation
    members: tuple[Target, ...]
    earlier: frozenset[Specialisation] = frozenset()
    plan: Plan | None = None
    search: ClassSearch | None = None
    results: list[BucketResult] = field(default_factory=list)
    begun: bool = False
    taken: bool = False


class Beginnings:
    """Plans classes.

    Args:
        env: what the classes share.
        options: how much to search.
        incumbents: configurations that tables suggest for a bucket.
        winners: of classes that are finished.
    """

    def __init__(self, env: Environment, options: Options, incumbents: Incumbents, winners: Winners) -> None:
        self._env = env
        self._options = options
        self._incumbents = incumbents
        self._winners = winners

    def plan(self, one: ClassRun) -> Plan:
        """Return what the search of a class depends on: the plan of an interrupted search, or a new one."""
        options = (self._options.trials, self._options.rounds, self._options.anchors, self._env.seed)
        store = self._env.store
        # Read whenever it is asked for: another run on this storage may have begun in the meantime.
        one.plan = Plan.read(store, one.members, self._env.variants(one.problem.op), options)
        if one.plan is None:
            hints = {t: self._incumbents(t) for t in one.members}
            held = {t: (h.held,) if h.held is not None else () for t, h in hints.items()}
            one.plan = Plan.make(store, one.members, options, held, {t: h.near for t, h in hints.items()})
        return one.plan

    def first(self, one: ClassRun, keep: bool) -> Mapping[Target, Sequence[Config]]:
        """Return what a class that has a plan tries first in each bucket: as planned, or by the winners there are now.

        Args:
            one: the class.
            keep: whether the next run is to begin with the same.
        """
        assert one.plan is not None
        if one.plan.warm is not None:
            return one.plan.warm
        held, near = one.plan.held, one.plan.near
        first = {t: self._winners.first(t, held[t], near[t], one.earlier) for t in one.members}
        if keep:
            one.plan.begin(self._env.store, one.members, first)
        return first
