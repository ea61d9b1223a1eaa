"""What a bucket tries first: the winners of related classes, and what tables hold."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

from bole_codegen.search.kinds import kind_of, order
from bole_codegen.search.targets import Target
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config

#: Winners of related classes that a bucket tries first.
WARM = 4


class Winners:
    """The winners of classes that are finished."""

    def __init__(self) -> None:
        self._found: dict[Specialisation, list[tuple[int, Config]]] = {}

    def add(self, problem: Specialisation, work: int, config: Config) -> None:
        """Add the winner of a bucket.

        Args:
            problem: representative of its class.
            work: of the bucket.
            config: with its parameters in the declared order.
        """
        self._found.setdefault(problem, []).append((work, config))

    def first(
        self, target: Target, held: Sequence[Config], near: Sequence[Config], earlier: Set[Specialisation]
    ) -> list[Config]:
        """Return what to try first: the table's entry, winners of the most similar classes, entries of near buckets.

        Args:
            target: the bucket.
            held: the table's entry, none or one.
            near: entries of other buckets or related GPUs, nearest first.
            earlier: classes whose winners may be used.
        """
        problem = target.problem
        kind = kind_of(problem)
        winners = {p: w for p, w in self._found.items() if p.op == problem.op and p in earlier}
        found: list[Config] = []
        for other in sorted(winners, key=lambda p: (kind.distance(problem, p), order(p)))[:3]:
            by_work = sorted(winners[other], key=lambda w: (abs(math.log2(w[0] / problem.work)), -w[0]))
            found += [config for _, config in by_work[:2]]
        return list(dict.fromkeys([*held, *found, *near]))[: WARM + 1]
