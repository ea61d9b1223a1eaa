"""The state of the search for one class of buckets: what was tried, what to try next, what is kept of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bole_codegen.search.class_results import ClassResults
from bole_codegen.search.duplicates import Duplicates
from bole_codegen.search.environment import Environment
from bole_codegen.search.first import first_candidates
from bole_codegen.search.kept import Kept
from bole_codegen.search.results import BAD_KINDS, Failed, Measurement, Screened, Screening, Timed
from bole_codegen.search.sampler import Sampler
from bole_codegen.search.space import SpaceView, view_all
from bole_codegen.search.store import Record
from bole_codegen.search.targets import Target, anchors
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config, Variant


@dataclass(kw_only=True)
class ClassSearch(ClassResults):
    """The search of one class.

    Attributes:
        env: of the run.
        problem: representative of the class.
        members: its buckets, in order of work.
        trials: candidates to try.
        duplicates: candidates that rendered to kernels already tried.
        resumed: evaluations taken over from earlier runs.
        kept: evaluations of an interrupted search, which answer the same questions of this one.

    What candidates gave is in the attributes of :class:`ClassResults`.
    """

    env: Environment
    problem: Specialisation
    members: tuple[Target, ...]
    trials: int
    views: tuple[SpaceView, ...] = ()
    duplicates: int = 0
    resumed: int = 0
    kept: Kept = field(init=False)
    _variants: dict[str, Variant] = field(default_factory=dict)
    _seen: set[Config] = field(default_factory=set)
    _same: Duplicates = field(init=False)
    _samplers: dict[Target, Sampler] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._same = Duplicates(self.problem, self.env.render)

    @classmethod
    def open(
        cls,
        env: Environment,
        problem: Specialisation,
        members: Sequence[Target],
        trials: int,
        anchor_count: int,
        before: Sequence[int] = (),
    ) -> ClassSearch:
        """Begin with a class: its defaults, and what earlier runs finished.

        Args:
            env: of the run.
            problem: representative.
            members: buckets, in order of work.
            trials: candidates to try.
            anchor_count: buckets to search.
            before: evaluations of each bucket that are known from the beginning; later ones are those of an
                interrupted search, which this one repeats.

        Raises:
            ValueError: no variant can serve the problem.
        """
        search = cls(
            env=env, problem=problem, members=tuple(members), searched=anchors(members, anchor_count), trials=trials
        )
        search._variants = {v.name: v for v in env.variants(problem.op) if v.applies(problem) is None}
        for target in search.members:
            search.times[target] = {}
            search.defaults[target] = env.default(target.problem, env.limits)
        search.kept = Kept(env.store, members, before or [0] * len(members), search._same.texts)
        search._adopt(search.kept.before)
        return search

    def prepare(self, warm: Mapping[Target, Sequence[Config]]) -> None:
        """Find the valid space, rank it by the model, and queue what to try first. Takes a second, aside if need be.

        Args:
            warm: configurations that other tables or earlier classes suggest, by bucket.
        """
        self.views = view_all(self._variants.values(), self.problem, self.env.limits, self.env.seed)
        for i, target in enumerate(self.searched):
            self._samplers[target] = Sampler(self.views, self.env.seed + i, self.trials)
        env = self.env
        first = first_candidates(
            self.views, self.searched, self.defaults, warm,
            record=env.record, limits=env.limits, trials=self.trials, seed=env.seed,
        )  # fmt: skip
        for target, sampler in self._samplers.items():
            sampler.enqueue(first[target])

    @property
    def prepared(self) -> bool:
        """Whether candidates can be proposed."""
        return bool(self._samplers)

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
                known = self._same.admit(config)
            except Exception as error:  # A template that cannot be rendered for it.
                failed = Failed("error", f"does not render: {type(error).__name__}: {error}")
                self.set_screened(config, failed, keep=self.kept.screening(config) is None)
                self.settle([config])
                broken += 1
                continue
            if known != config:
                self.duplicates += 1
                self.settle([known])
                continue
            fresh.append(config)
        return fresh

    def admit(self, config: Config) -> Config:
        """Take a configuration in that no sampler proposed; return the one that stands for its kernels."""
        self._seen.add(config)
        return self._same.admit(config)

    def set_screened(self, config: Config, result: Screening, stage: str = "check", keep: bool = True) -> None:
        """Record a screening; a failure is kept.

        Args:
            config: the candidate.
            result: what came of it.
            stage: ``check``, or ``full`` for the check of a finalist.
            keep: False for one that was kept before.
        """
        self.screened[config] = result
        if isinstance(result, Failed):
            first = self.searched[0]
            self.resumed += not keep
            self.history.append((first.problem.key(), config, result))
            self._mark_bad(config, result)
            if keep:
                self.env.store.add(first, Record(config, self._same.texts(config), result, stage=stage))

    def set_time(
        self, target: Target, config: Config, result: Measurement, stage: str = "time", keep: bool = True
    ) -> None:
        """Record a quick timing in one bucket, or with ``finals`` as its stage a finalist that failed there."""
        self.times[target][config] = result
        self.resumed += not keep
        if isinstance(result, Failed) and result.kind in BAD_KINDS:
            self.screened[config] = result
            self._mark_bad(config, result)
        self.history.append((target.problem.key(), config, result))
        if keep:
            screening = self.screened.get(config)
            error = screening.error if isinstance(screening, Screened) else None
            self.env.store.add(target, Record(config, self._same.texts(config), result, error, stage))

    def settle(self, configs: Iterable[Config]) -> None:
        """Tell the samplers what came of candidates, in this order whatever order they finished in."""
        standing = self._same.others()
        for config in configs:
            screening = self.screened.get(config)
            for target, sampler in self._samplers.items():
                result = self.times[target].get(config)
                if isinstance(screening, Failed) or isinstance(result, Failed):
                    value = None
                elif isinstance(result, Timed):
                    value = result.median_us
                elif self.times_elsewhere(target, config):
                    value = None  # Too slow elsewhere to be timed here.
                else:
                    continue
                for name in (config, *standing.get(config, ())):
                    sampler.tell(name, value)

    def texts(self, config: Config) -> tuple[str, ...]:
        """Return the text hashes of the kernels of a configuration; none when it does not render."""
        return self._same.texts(config)

    def known_bad(self, config: Config) -> Failed | None:
        """Return how the kernels of a candidate failed on such a GPU before, None when they did not."""
        if self.env.known_bad is None:
            return None
        return self.env.known_bad.find(self.problem, config, self._same.texts(config))

    def to_time(self, target: Target) -> list[Config]:
        """Return the candidates that passed, can serve a bucket and have no time in it yet."""
        done = self.times[target]
        return [
            c for c, s in self.screened.items() if isinstance(s, Screened) and c not in done and self.fits(target, c)
        ]

    def fits(self, target: Target, config: Config) -> bool:
        """Return whether a configuration can serve a bucket, by its declaration."""
        variant = self._variants.get(config.variant)
        return variant is not None and variant.reason(target.problem, config, self.env.limits) is None

    def representative(self, config: Config) -> Config:
        """Return the configuration that stands for ``config``: itself, or the earlier one with the same kernels."""
        return self._same.standing(config)

    def _mark_bad(self, config: Config, result: Failed) -> None:
        if self.env.known_bad is not None and result.kind in BAD_KINDS:
            self.env.known_bad.add(self.problem, config, self._same.texts(config), result)

    def adopt_rest(self) -> None:
        """Take over what an interrupted search finished and this one had no time to ask for."""
        self._adopt((t, r) for t, r in self.kept.rest() if r.config not in self.times[t])

    def _adopt(self, records: Iterable[tuple[Target, Record]]) -> None:
        """Take over finished evaluations, where the kernels are still the same."""
        for target, record in records:
            # Without text it did not render, which says nothing about today.
            if not record.texts or record.texts != self._same.texts(record.config):
                continue
            if self._same.admit(record.config) != record.config:
                continue
            self._seen.add(record.config)
            self.recall([(target, record)])

    def recall(self, records: Iterable[tuple[Target, Record]]) -> None:
        """Take over evaluations as they are, whatever the text of the kernels is today."""
        for target, record in records:
            self.resumed += 1
            config, outcome = record.config, record.outcome
            here = record.stage in ("time", "finals")
            if isinstance(outcome, Timed) or (here and outcome.kind not in BAD_KINDS):
                self.screened.setdefault(config, Screened(record.error))
                self.times[target][config] = outcome
            else:
                # Of every bucket: one that was timed and then failed its full check stays failed.
                self.screened[config] = outcome
            self.history.append((target.problem.key(), config, outcome))
