"""The valid part of a declared parameter space, and the identity of what a configuration renders to."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np

from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config, GpuLimits, Value, Variant

#: A space of at most this many assignments is tried in full, one by one, against the declared constraints.
FULL_PRODUCT = 60_000
#: Valid configurations kept of a variant whose space is larger.
POOL = 4_000

#: Specialisation and configuration to rendered kernels.
Render = Callable[[Specialisation, Config], Sequence[Any]]
Identity = tuple[tuple[str, int, int], ...]


def space_hash(variants: Iterable[Variant], *more: str) -> str:
    """Return a short hash of declared spaces: a changed space or protocol never mixes with an older one."""
    declared = [[v.op, v.name, [[p.name, list(p.choices), p.ordered] for p in v.params]] for v in variants]
    return hashlib.sha256(json.dumps([declared, *more], sort_keys=True).encode()).hexdigest()[:12]


def identity(problem: Specialisation, config: Config, render: Render) -> Identity:
    """Return what makes two configurations the same work: text and launch options of every kernel.

    Tile sizes are constants in the text, so the launch grid follows from it.
    """
    return tuple((k.text_hash, k.plan.num_warps, k.plan.num_stages) for k in render(problem, config))


class _Looked(Config):
    """A configuration that is asked for its values many times, and never kept."""

    def __init__(self, variant: str, params: tuple[tuple[str, Value], ...]) -> None:
        super().__init__(variant, params)
        object.__setattr__(self, "_values", dict(params))

    def __getitem__(self, name: str) -> Any:
        values: dict[str, Any] = self.__dict__["_values"]
        return values[name]


class SpaceView:
    """Valid configurations of one variant that are worth trying for one problem on one GPU.

    Declared constraints are opaque functions, and few assignments pass them. So the values that occur in any valid
    configuration are found first (random assignments, then changes of one or two parameters until nothing new turns
    up), and only their product is tried in full.

    Args:
        variant: the declaration.
        problem: the problem; the variant must apply to it.
        limits: of the GPU.
        seed: for spaces too large to try in full.
    """

    def __init__(self, variant: Variant, problem: Specialisation, limits: GpuLimits, seed: int = 0) -> None:
        self.variant = variant
        self.problem = problem
        self.limits = limits
        self._rng = random.Random(f"{seed} {variant.name} {problem.key()}")
        self.default = variant.default(problem, limits)
        self.configs: tuple[Config, ...] = tuple(self._valid())
        self._index = {p.name: {c: i for i, c in enumerate(p.choices)} for p in variant.params}
        shape = (len(self.configs), len(variant.params))
        self._points = np.array([self.point(c) for c in self.configs], dtype=np.int32).reshape(shape)
        self._ordered = np.array([p.ordered for p in variant.params])

    def point(self, config: Config) -> tuple[int, ...]:
        """Return the indices of a configuration's values in their declared choices."""
        return tuple(self._index[n][v] for n, v in config.params)

    def ok(self, config: Config) -> bool:
        """Return whether the declared constraints allow a configuration."""
        return self.variant.reason(self.problem, config, self.limits) is None

    def nearest(self, values: dict[str, Value], taken: Callable[[Config], bool]) -> Config | None:
        """Return the valid configuration nearest to an assignment that is not taken, or None when all are.

        An ordered parameter counts by steps, another by whether it differs.
        """
        want = [self._index[p.name][values[p.name]] for p in self.variant.params]
        away = np.abs(self._points - np.array(want, dtype=np.int32))
        costs = np.where(self._ordered, away, 2 * (away != 0)).sum(axis=1)
        for i in np.argsort(costs, kind="stable").tolist():
            config: Config = self.configs[i]
            if not taken(config):
                return config
        return None

    def _valid(self) -> list[Config]:
        tried = self.variant.choices(self.problem, self.limits)
        total = 1
        for choices in tried:
            total *= len(choices)
        if total <= 5_000:
            return self._filter(product(*tried))
        known = self._explore(tried)
        useful = [tuple(c for c in choices if any(k[i] == c for k in known)) for i, choices in enumerate(tried)]
        total = 1
        for choices in useful:
            total *= max(1, len(choices))
        if total <= FULL_PRODUCT:
            return self._filter(product(*useful))
        return [self._config(k) for k in sorted(known, key=repr)]

    def _config(self, values: tuple[Value, ...]) -> Config:
        return Config(self.variant.name, tuple(zip((p.name for p in self.variant.params), values, strict=True)))

    def _filter(self, values: Iterable[tuple[Value, ...]]) -> list[Config]:
        # Tens of thousands: looked up in a dict, and without asking each time whether the variant applies.
        names = [p.name for p in self.variant.params]
        check, problem, limits = self.variant.check, self.problem, self.limits
        found = []
        for assignment in values:
            params = tuple(zip(names, assignment, strict=True))
            if check(problem, _Looked(self.variant.name, params), limits) is None:
                found.append(Config(self.variant.name, params))
        return found

    def _explore(self, tried: Sequence[tuple[Value, ...]]) -> set[tuple[Value, ...]]:
        known: set[tuple[Value, ...]] = set()
        seen: set[tuple[int, Value]] = set()

        def add(values: tuple[Value, ...]) -> bool:
            """Add a valid assignment; return whether it holds a value not seen before."""
            if values in known or not self.ok(self._config(values)):
                return False
            known.add(values)
            new = {(i, v) for i, v in enumerate(values)} - seen
            seen.update(new)
            return bool(new)

        add(tuple(v for _, v in self.default.params))
        for _ in range(2_000):
            add(tuple(self._rng.choice(choices) for choices in tried))
        quiet = 0
        while quiet < 2 and len(known) < POOL:
            fresh = False
            for base in self._rng.sample(sorted(known, key=repr), min(len(known), 40)):
                for i, choices in enumerate(tried):
                    for choice in choices:
                        changed = (*base[:i], choice, *base[i + 1 :])
                        fresh = add(changed) or fresh
                        # A constraint may tie two parameters together: change a second one with it.
                        j = self._rng.randrange(len(tried))
                        other = self._rng.choice(tried[j])
                        fresh = add((*changed[:j], other, *changed[j + 1 :])) or fresh
            quiet = 0 if fresh else quiet + 1
        return known


def view_all(
    variants: Iterable[Variant], problem: Specialisation, limits: GpuLimits, seed: int = 0
) -> tuple[SpaceView, ...]:
    """Return a view of every variant that applies to ``problem`` and has a valid configuration."""
    views = [SpaceView(v, problem, limits, seed) for v in variants if v.applies(problem) is None]
    return tuple(v for v in views if v.configs)
