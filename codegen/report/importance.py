"""Which parameters decide a kernel's time, from the candidates of a search."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from bole_codegen.search.class_search import ClassSearch
from bole_codegen.search.results import Timed
from bole_runtime.kernels.space import Config

#: Timed candidates of a variant below which nothing is said.
LEAST = 6


def importances(searches: Sequence[ClassSearch]) -> dict[str, list[tuple[str, float]]]:
    """Return for each operation and variant its parameters with their importance, most important first.

    The importance of a parameter is the part of the variance of log time that its values explain alone, in the mean
    over the searched buckets with enough candidates. Parameters that depend on each other share it, so that the parts
    do not add up to one.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for search in searches:
        for target in search.searched:
            by_variant: dict[str, dict[Config, float]] = {}
            for config, result in search.times[target].items():
                if isinstance(result, Timed) and result.median_us > 0:
                    by_variant.setdefault(config.variant, {})[config] = result.median_us
            for variant, times in by_variant.items():
                for name, part in _explained(times).items():
                    found.setdefault(f"{search.problem.op} {variant}", {}).setdefault(name, []).append(part)
    ranked: dict[str, list[tuple[str, float]]] = {}
    for name, parts in sorted(found.items()):
        means = [(p, statistics.fmean(v)) for p, v in parts.items()]
        ranked[name] = sorted(means, key=lambda m: (-m[1], m[0]))
    return ranked


def _explained(times: Mapping[Config, float]) -> dict[str, float]:
    logs = {c: math.log(us) for c, us in times.items()}
    if len(logs) < LEAST:
        return {}
    mean = statistics.fmean(logs.values())
    total = sum((x - mean) ** 2 for x in logs.values())
    if total <= 0:
        return {}
    found = {}
    for name in next(iter(logs)).as_dict():
        groups: dict[object, list[float]] = {}
        for config, x in logs.items():
            groups.setdefault(config[name], []).append(x)
        if len(groups) < 2:
            continue
        between = sum(len(g) * (statistics.fmean(g) - mean) ** 2 for g in groups.values())
        # Groups of few candidates explain something by chance: as the adjusted R squared does.
        free, values = len(logs) - 1, len(groups) - 1
        within = (total - between) / max(1, free - values)
        found[name] = max(0.0, 1 - within / (total / free)) if free > values else 0.0
    return found
