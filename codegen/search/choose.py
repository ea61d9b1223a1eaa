"""From final times to a table entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from bole_codegen.search.kinds import kind_of
from bole_codegen.search.results import Measurement, Timed
from bole_codegen.search.targets import Target
from bole_runtime.kernels.space import Config
from bole_runtime.tables.schema import AnyEntry, KernelRef, RunnerUp, new_entry

#: Times closer than this are equal, whatever their spread says.
NOISE = 0.01
#: Times further apart than this differ, whatever their spread says.
NOISE_LIMIT = 0.03
#: Predictions closer than this are equal: where it could be compared with measurements, the model was off by up to a
#: factor of two between one variant and another.
MODEL_NOISE = 1.0


def choose(
    times: Mapping[Config, Measurement],
    default: Config | None,
    incumbent: Config | None,
    kernels: Callable[[Config], int],
    label: Literal["measured", "predicted"] = "measured",
) -> Config | None:
    """Return the configuration to keep, None when nothing has a time.

    Among those within noise of the fastest: fewest kernels, then the incumbent, then the default, then the fastest.
    Never one that was slower than the default in this comparison. Of predictions that the model cannot tell apart, the
    default, which is what runs without a table, then the incumbent.

    Args:
        times: of the finalists, from one interleaved run.
        default: the analytic default.
        incumbent: what the table holds today.
        kernels: launches of a configuration.
        label: whether times were measured or predicted.
    """
    good = {c: t for c, t in times.items() if isinstance(t, Timed)}
    if not good:
        return None
    fastest = min(good, key=lambda c: (good[c].median_us, str(c)))
    best = good[fastest]
    noise = min(NOISE_LIMIT, max(NOISE, 0.5 * best.spread_us / max(best.median_us, 1e-9)))
    if label == "predicted":
        noise = MODEL_NOISE
    tied = [c for c, t in good.items() if t.median_us <= best.median_us * (1 + noise)]
    if default in good:
        limit = good[default].median_us
        tied = [c for c in tied if c == default or good[c].median_us <= limit]
    if label == "predicted":
        return min(tied, key=lambda c: (c != default, c != incumbent, good[c].median_us, kernels(c), str(c)))
    return min(tied, key=lambda c: (kernels(c), c != incumbent, c != default, good[c].median_us, str(c)))


def make_entry(
    target: Target,
    times: Mapping[Config, Measurement],
    chosen: Config,
    default: Config,
    *,
    rendered: Sequence[Any],
    floor_us: float,
    error: float | None,
    label: Literal["measured", "predicted"],
    transferred_from: Target | None,
    trials: int,
) -> AnyEntry:
    """Build the table entry of a bucket.

    Args:
        target: the bucket.
        times: of the finalists.
        chosen: as :func:`choose` gives it.
        default: the analytic default of the bucket.
        rendered: kernels of ``chosen``, with ``name`` and ``text_hash``.
        floor_us: memory floor.
        error: relative error of the check.
        label: whether it ran here.
        transferred_from: the searched bucket whose best were timed here, None when this one was searched.
        trials: candidates tried in the class.
    """
    good = {c: t for c, t in times.items() if isinstance(t, Timed)}
    mine = good[chosen]
    others = sorted((t.median_us, str(c), c) for c, t in good.items() if c != chosen)
    second = others[0][2] if others else None
    runner_up = None
    margin = None
    if second is not None:
        runner_up = RunnerUp(variant=second.variant, params=second.as_dict(), median_us=_round(good[second].median_us))
        margin = max(0.0, round(good[second].median_us / mine.median_us - 1, 4))
    return new_entry(
        target.problem,
        **kind_of(target.problem).values(target),
        variant=chosen.variant,
        params=chosen.as_dict(),
        median_us=_round(mine.median_us),
        spread_us=_round(mine.spread_us),
        floor_us=_round(floor_us),
        ratio=round(mine.median_us / max(floor_us, 1e-9), 3),
        error=None if error is None else float(f"{error:.2e}"),
        default_us=_round(good[default].median_us) if default in good else None,
        runner_up=runner_up,
        margin=margin,
        kernels=[KernelRef(name=k.name, text_hash=k.text_hash) for k in rendered],
        label=label,
        transferred_from=None if transferred_from is None else transferred_from.problem.key(),
        trials=trials,
    )


def _round(value: float) -> float:
    """Keep four significant digits, and no more than a thousandth of a microsecond."""
    return round(float(f"{value:.4g}"), 3)
