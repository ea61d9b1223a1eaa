"""The state of the search for one class of buckets: what was tried, what it gave, what to try next."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bole_codegen.search import roofline
from bole_codegen.search.results import Failed, Measurement, Screened, Screening, Timed
from bole_codegen.search.sampler import Sampler
from bole_codegen.search.space import Identity, Render, SpaceView, identity, view_all
from bole_codegen.search.store import Record, Store
from bole_codegen.search.targets import Target, anchors
from bole_runtime.gpus import GpuRecord
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, GpuLimits, Variant

#: Configurations of a variant that the model ranks; more only costs time.
RANKED = 1_000
#: Failures in one bucket that rule a candidate out in all of them.
FATAL = ("crash", "illegal", "hang", "wrong", "bounds", "nan")


@dataclass(frozen=True)
class Environment:
    """What every class of a run shares.

    Attributes:
        record: the GPU.
        limits: of the GPU.
        variants: op -> declared variants.
        default: the analytic default.
        render: problem and configuration to kernels.
        store: finished evaluations.
        seed: of samplers.
    """

    record: GpuRecord
    limits: GpuLimits
    variants: Callable[[str], Iterable[Variant]]
    default: Callable[[Problem, GpuLimits], Config]
    render: Render
    store: Store
    seed: int


@dataclass
class ClassSearch:
    """One class.

    Attributes:
        env: of the run.
        problem: representative of the class.
        members: its buckets, in order of work.
        searched: those among them that candidates are searched for.
        trials: candidates to try.
    """

    env: Environment
    problem: Problem
    members: tuple[Target, ...]
    searched: tuple[Target, ...]
    trials: int
    views: tuple[SpaceView, ...] = ()
    screened: dict[Config, Screening] = field(default_factory=dict)
    times: dict[Target, dict[Config, Measurement]] = field(default_factory=dict)
    defaults: dict[Target, Config] = field(default_factory=dict)
    duplicates: int = 0
    resumed: int = 0
    history: list[tuple[str, Config, Measurement]] = field(default_factory=list)
    _seen: set[Config] = field(default_factory=set)
    _same: dict[Identity, Config] = field(default_factory=dict)
    _alias: dict[Config, Config] = field(default_factory=dict)
    _texts: dict[Config, tuple[str, ...]] = field(default_factory=dict)
    _samplers: dict[Target, Sampler] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        env: Environment,
        problem: Problem,
        members: Sequence[Target],
        trials: int,
        anchor_count: int,
        warm: Mapping[Target, Sequence[Config]],
    ) -> ClassSearch:
        """Prepare a class: its valid space, its defaults, what an earlier run finished.

        Args:
            env: of the run.
            problem: representative.
            members: buckets, in order of work.
            trials: candidates to try.
            anchor_count: buckets to search.
            warm: configurations that other tables or earlier classes suggest, by bucket.

        Raises:
            ValueError: no variant can serve the problem.
        """
        search = cls(env, problem, tuple(members), anchors(members, anchor_count), trials)
        search.views = view_all(env.variants(problem.op), problem, env.limits, env.seed)
        if not search.views:
            raise ValueError(f"no variant can serve {problem.key()} on {env.record.title}")
        for target in search.members:
            search.times[target] = {}
            search.defaults[target] = env.default(target.problem, env.limits)
        for i, target in enumerate(search.searched):
            search._samplers[target] = Sampler(search.views, env.seed + i, trials)
        search._resume()
        search._enqueue(warm)
        return search

    @property
    def tried(self) -> int:
        """Candidates screened so far, in earlier runs too."""
        return len(self.screened)

    def propose(self, count: int) -> list[Config]:
        """Return up to ``count`` new candidates, asking the samplers of the searched buckets in turn."""
        fresh: list[Config] = []
        active = list(self.searched)
        turn = broken = 0
        # Spaces with many duplicates must not be walked to their end for one more candidate.
        asks = 10 * count + 20
        while active and len(fresh) + broken < count and turn < asks:
            target = active[turn % len(active)]
            config = self._samplers[target].ask(self._seen.__contains__)
            if config is None:
                active.remove(target)
                continue
            turn += 1
            self._seen.add(config)
            try:
                known = self._known(config)
            except Exception as error:  # A template that cannot be rendered for it.
                self.set_screened(config, Failed("error", f"does not render: {type(error).__name__}: {error}"))
                broken += 1
                continue
            if known != config:
                self.duplicates += 1
                self._alias[config] = known
                self._tell_alias(config, known)
                continue
            fresh.append(config)
        return fresh

    def set_screened(self, config: Config, result: Screening) -> None:
        """Record a screening; a failure is kept and told to every sampler."""
        self.screened[config] = result
        if isinstance(result, Failed):
            first = self.searched[0]
            self.env.store.add(first, Record(config, self._texts.get(config, ()), result))
            self.history.append((first.problem.key(), config, result))
            for sampler in self._samplers.values():
                sampler.tell(config, None)

    def set_time(self, target: Target, config: Config, result: Measurement, keep: bool = True) -> None:
        """Record a quick timing in one bucket."""
        self.times[target][config] = result
        if isinstance(result, Failed) and result.kind in FATAL:
            self.screened[config] = result
        self.history.append((target.problem.key(), config, result))
        if keep:
            screening = self.screened.get(config)
            error = screening.error if isinstance(screening, Screened) else None
            self.env.store.add(target, Record(config, self._texts[config], result, error))
        sampler = self._samplers.get(target)
        value = result.median_us if isinstance(result, Timed) else None
        if sampler is not None:
            sampler.tell(config, value)
            for other, known in self._alias.items():
                if known == config:
                    sampler.tell(other, value)

    def to_time(self, target: Target) -> list[Config]:
        """Return the candidates that passed and have no time in a searched bucket yet."""
        done = self.times[target]
        return [
            c
            for c, s in self.screened.items()
            if isinstance(s, Screened) and c not in done and self.reason(target, c) is None
        ]

    def reason(self, target: Target, config: Config) -> str | None:
        """Return why a configuration cannot serve a bucket, by its declaration."""
        for view in self.views:
            if view.variant.name == config.variant:
                return view.variant.reason(target.problem, config, self.env.limits)
        return f"no variant {config.variant!r}"

    def best(self, target: Target, count: int) -> list[Config]:
        """Return the fastest configurations of a bucket by quick time."""
        good = [
            (r.median_us, str(c), c)
            for c, r in self.times[target].items()
            if isinstance(r, Timed) and not isinstance(self.screened.get(c), Failed)
        ]
        return [c for _, _, c in sorted(good, key=lambda g: g[:2])[:count]]

    def representative(self, config: Config) -> Config:
        """Return the configuration that stands for ``config``: itself, or the earlier one with the same kernels."""
        return self._alias.get(config, config)

    def error_of(self, config: Config) -> float | None:
        """Return the error of a configuration's check."""
        screening = self.screened.get(config)
        return screening.error if isinstance(screening, Screened) else None

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

    def _known(self, config: Config) -> Config:
        found = identity(self.problem, config, self.env.render)
        self._texts[config] = tuple(text for text, _, _ in found)
        return self._same.setdefault(found, config)

    def _tell_alias(self, config: Config, known: Config) -> None:
        for target, sampler in self._samplers.items():
            result = self.times[target].get(known)
            if isinstance(self.screened.get(known), Failed) or isinstance(result, Failed):
                sampler.tell(config, None)
            elif isinstance(result, Timed):
                sampler.tell(config, result.median_us)

    def _resume(self) -> None:
        """Take over what an earlier run finished, where the kernels are still the same."""
        for target in self.members:
            for record in self.env.store.load(target):
                try:
                    known = self._known(record.config)
                except Exception:  # It no longer renders: the old result says nothing.
                    continue
                if known != record.config or record.texts != self._texts[record.config]:
                    continue
                self._seen.add(record.config)
                self.resumed += 1
                if isinstance(record.outcome, Timed):
                    self.screened.setdefault(record.config, Screened(record.error))
                    self.set_time(target, record.config, record.outcome, keep=False)
                elif self.screened.get(record.config) is None:
                    self.screened[record.config] = record.outcome
                    self.history.append((target.problem.key(), record.config, record.outcome))
                    for sampler in self._samplers.values():
                        sampler.tell(record.config, None)

    def _enqueue(self, warm: Mapping[Target, Sequence[Config]]) -> None:
        """Queue the first candidates: defaults, what tables and earlier classes suggest, what the model likes."""
        by_name = {v.variant.name: v.variant for v in self.views}
        rng = random.Random(self.env.seed)
        pool: list[Config] = []
        for view in self.views:
            configs = list(view.configs)
            pool += configs if len(configs) <= RANKED else rng.sample(configs, RANKED)
        others = [v.default for v in self.views]
        liked = max(4, self.trials // (2 * len(self.searched)))
        for target, sampler in self._samplers.items():
            # The default of every bucket is compared with in the end, so each must be screened.
            first = [self.defaults[target], *self.defaults.values(), *others, *warm.get(target, ())]
            model = roofline.promising(target, pool, by_name.__getitem__, self.env.record, liked)
            sampler.enqueue([*first, *model])
