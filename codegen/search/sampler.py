"""What to try next in one bucket: every point when there are few, else Optuna's TPE, drawn to the valid space."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import Trial, TrialState, create_trial

from bole_codegen.search.space import SpaceView
from bole_runtime.kernels.space import Config, Value, Variant

optuna.logging.set_verbosity(optuna.logging.WARNING)

#: Random trials before the model speaks, warm starts included.
STARTUP = 10


def trial_params(variant: Variant, config: Config) -> tuple[dict[str, object], dict[str, BaseDistribution]]:
    """Return a configuration as Optuna parameters over the declared choices: ordered ones by index."""
    params: dict[str, object] = {}
    distributions: dict[str, BaseDistribution] = {}
    for p in variant.params:
        name = f"{variant.name}.{p.name}"
        if p.ordered:
            params[name] = p.choices.index(config[p.name])
            distributions[name] = IntDistribution(0, len(p.choices) - 1)
        else:
            params[name] = config[p.name]
            distributions[name] = CategoricalDistribution(p.choices)
    return params, distributions


class Sampler:
    """Proposes configurations of one bucket. Nothing here is stored: finished trials are told again on resume.

    Args:
        views: the valid space, one view a variant.
        seed: two samplers with the same seed that are told the same propose the same.
        budget: trials that the whole search may spend here; a space of at most that size is enumerated.
    """

    def __init__(self, views: Sequence[SpaceView], seed: int, budget: int) -> None:
        if not views:
            raise ValueError("no variant has a valid configuration")
        self._views = {v.variant.name: v for v in views}
        self.points = sum(len(v.configs) for v in views)
        self.enumerated = self.points <= budget
        self._queue: list[Config] = []
        self._asked: dict[Config, Trial] = {}
        self._told: set[Config] = set()
        if self.enumerated:
            self._queue = [c for v in views for c in v.configs]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=STARTUP, multivariate=True, group=True, constant_liar=True
            )
        self._study = optuna.create_study(direction="minimize", sampler=sampler)
        self._choices = {
            v.variant.name: {
                p.name: tuple(c for c in p.choices if any(k[p.name] == c for k in v.configs)) for p in v.variant.params
            }
            for v in views
        }

    def enqueue(self, configs: Sequence[Config]) -> None:
        """Propose these first, in this order. Those outside the valid space are left out."""
        fresh = [c for c in configs if c.variant in self._views and self._views[c.variant].ok(c)]
        queued = set(self._queue)
        if self.enumerated:
            self._queue = list(dict.fromkeys([*fresh, *self._queue]))
        else:
            self._queue += [c for c in dict.fromkeys(fresh) if c not in queued]

    def ask(self, taken: Callable[[Config], bool]) -> Config | None:
        """Return the next configuration that is not taken, None when there is nothing left."""
        while self._queue:
            config = self._queue.pop(0)
            if not taken(config):
                return config
        if self.enumerated:
            return None
        trial = self._study.ask()
        name, values = self._suggest(trial)
        view = self._views[name]
        config = Config(name, tuple(values.items()))
        if view.ok(config) and not taken(config):
            self._asked[config] = trial
            return config
        # Few assignments are valid: take the nearest one that is, and let the model forget the wish.
        self._study.tell(trial, state=TrialState.FAIL)
        nearest = view.nearest(values, taken)
        if nearest is not None:
            return nearest
        left = (c for v in self._views.values() for c in v.configs if not taken(c))
        return next(left, None)

    def tell(self, config: Config, value: float | None) -> None:
        """Report a time in microseconds, or None for a candidate that failed. Telling twice is harmless."""
        if config in self._told or config.variant not in self._views:
            return
        self._told.add(config)
        state = TrialState.PRUNED if value is None else TrialState.COMPLETE
        trial = self._asked.pop(config, None)
        if trial is not None:
            self._study.tell(trial, value, state=state)
            return
        if self.enumerated:
            return
        params, distributions = self._as_trial(config)
        if params is not None:
            self._study.add_trial(create_trial(state=state, value=value, params=params, distributions=distributions))

    def _suggest(self, trial: Trial) -> tuple[str, dict[str, Value]]:
        names = tuple(self._views)
        name = str(trial.suggest_categorical("variant", names)) if len(names) > 1 else names[0]
        values: dict[str, Value] = {}
        for p in self._views[name].variant.params:
            choices = self._choices[name][p.name]
            if len(choices) == 1:
                values[p.name] = choices[0]
            elif p.ordered:
                values[p.name] = choices[trial.suggest_int(f"{name}.{p.name}", 0, len(choices) - 1)]
            else:
                picked: Any = trial.suggest_categorical(f"{name}.{p.name}", choices)
                values[p.name] = picked
        return name, values

    def _as_trial(self, config: Config) -> tuple[dict[str, object] | None, dict[str, BaseDistribution]]:
        names = tuple(self._views)
        params: dict[str, object] = {}
        distributions: dict[str, BaseDistribution] = {}
        if len(names) > 1:
            params["variant"] = config.variant
            distributions["variant"] = CategoricalDistribution(names)
        for p in self._views[config.variant].variant.params:
            choices = self._choices[config.variant][p.name]
            value = config[p.name]
            if value not in choices:
                return None, {}
            if len(choices) == 1:
                continue
            name = f"{config.variant}.{p.name}"
            if p.ordered:
                params[name], distributions[name] = choices.index(value), IntDistribution(0, len(choices) - 1)
            else:
                params[name], distributions[name] = value, CategoricalDistribution(choices)
        return params, distributions
