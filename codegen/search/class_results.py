"""What the candidates of one class of buckets gave, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bole_codegen.search.results import PASSING_KINDS, Failed, Measurement, Screened, Screening, Timed
from bole_codegen.search.targets import Target
from bole_runtime.kernels.space import Config

#: A candidate that is so many times slower than the best in the buckets where it was timed is not timed in the others.
HOPELESS = 2.5


@dataclass(kw_only=True)
class ClassResults:
    """Results of one class.

    Attributes:
        searched: its buckets that candidates are searched for.
        screened: what compiling and checking a candidate gave.
        times: quick times, by searched bucket or neighbour.
        defaults: analytic default of each bucket.
        history: every evaluation in the order made, with the key of its bucket.
    """

    searched: tuple[Target, ...]
    screened: dict[Config, Screening] = field(default_factory=dict)
    times: dict[Target, dict[Config, Measurement]] = field(default_factory=dict)
    defaults: dict[Target, Config] = field(default_factory=dict)
    history: list[tuple[str, Config, Measurement]] = field(default_factory=list)

    @property
    def tried(self) -> int:
        """Candidates screened so far, in earlier runs too."""
        return len(self.screened)

    def times_elsewhere(self, target: Target, config: Config) -> list[tuple[Target, float]]:
        """Return the times of a candidate in the other searched buckets."""
        found = ((t, self.times[t].get(config)) for t in self.searched if t != target)
        return [(t, r.median_us) for t, r in found if isinstance(r, Timed)]

    def bests(self) -> dict[Target, float]:
        """Return the best quick time of each searched bucket."""
        found = {}
        for target in self.searched:
            times = [r.median_us for r in self.times[target].values() if isinstance(r, Timed)]
            if times:
                found[target] = min(times)
        return found

    def hopeless(self, target: Target, config: Config, bests: Mapping[Target, float]) -> bool:
        """Return whether a candidate was so slow in other buckets that it need not be timed in this one.

        Args:
            target: the bucket.
            config: the candidate.
            bests: best times, as they were before this round: the answer must not depend on who finished first.
        """
        if config in self.defaults.values():
            return False
        elsewhere = [(us, bests[t]) for t, us in self.times_elsewhere(target, config) if t in bests]
        return bool(elsewhere) and all(us > HOPELESS * best for us, best in elsewhere)

    def best(self, target: Target, count: int) -> list[Config]:
        """Return the fastest configurations of a bucket by quick time."""
        good = [
            (r.median_us, str(c), c)
            for c, r in self.times[target].items()
            if isinstance(r, Timed) and not isinstance(self.screened.get(c), Failed)
        ]
        return [c for _, _, c in sorted(good, key=lambda g: g[:2])[:count]]

    def error_of(self, config: Config) -> float | None:
        """Return the error of a configuration's check."""
        screening = self.screened.get(config)
        return screening.error if isinstance(screening, Screened) else None

    def complete(self) -> bool:
        """Return whether every candidate had its turn."""
        results = [*self.screened.values(), *(r for times in self.times.values() for r in times.values())]
        return not any(isinstance(r, Failed) and r.kind in PASSING_KINDS for r in results)

    def failures(self) -> dict[str, int]:
        """Return how many candidates failed, by kind."""
        kinds: dict[Config, str] = {}
        results: list[Mapping[Config, Screening | Measurement]] = [self.screened, *self.times.values()]
        for part in results:
            for config, result in part.items():
                if isinstance(result, Failed):
                    kinds.setdefault(config, result.kind)
        counts: dict[str, int] = {}
        for kind in kinds.values():
            counts[kind] = counts.get(kind, 0) + 1
        return counts
