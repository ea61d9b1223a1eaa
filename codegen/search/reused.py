"""Classes that an earlier run finished: their results, and what their search was, as the storage has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bole_codegen.search.class_search import ClassSearch
from bole_codegen.search.environment import Environment
from bole_codegen.search.finish import BucketResult
from bole_codegen.search.targets import Target, anchors
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.tables.schema import AnyEntry, entry_type


@dataclass(frozen=True)
class Reused:
    """A class that an earlier run finished.

    Attributes:
        results: of its buckets.
        search: what was tried and what it gave, for reports; it can propose nothing.
        bandwidth_gbs: copy bandwidth that the earlier run measured, None where it is not known.
    """

    results: tuple[BucketResult, ...]
    search: ClassSearch
    bandwidth_gbs: float | None


def keep(
    env: Environment,
    search: ClassSearch,
    results: Sequence[BucketResult],
    trials: int,
    bandwidth_gbs: float | None = None,
) -> None:
    """Remember the finished buckets of a class, so that the same run need not do them again.

    Args:
        env: of the run.
        search: the class.
        results: of its buckets.
        trials: candidates that it might try.
        bandwidth_gbs: copy bandwidth of the run, None where none was measured.
    """
    for result in results:
        if result.entry is None or result.reused:
            continue
        # Evaluations of other text are named now, when every text is known: to render them all later would take long.
        stored = env.store.load(result.target)
        stale = [number for number, record in stored if record.texts != search.texts(record.config)]
        entry = msgspec.to_builtins(result.entry)
        data = {"stale": stale, "duplicates": search.duplicates, "bandwidth_gbs": bandwidth_gbs}
        env.store.set_final(result.target, {"trials": trials, "entry": entry, **data})
    # Searched again, say for other kernels or with more trials, it starts from all that is known then.
    env.store.set_plan(search.members[0], None)


def reuse(
    env: Environment, problem: Specialisation, members: Sequence[Target], trials: int, anchor_count: int
) -> Reused | None:
    """Return a class that an earlier run finished, None when any bucket is missing or out of date.

    Args:
        env: of the run.
        problem: representative of the class.
        members: its buckets.
        trials: candidates that this run would try; an earlier run with fewer does not count.
        anchor_count: buckets that this run would search.
    """
    found: list[BucketResult] = []
    finals: dict[Target, dict[str, Any]] = {}
    for target in members:
        data = env.store.final(target)
        if data is None:
            return None
        try:
            entry = msgspec.convert(data.get("entry"), entry_type(target.problem.op))
            config = next(v.config(entry.params) for v in env.variants(entry.op) if v.name == entry.variant)
            texts = [k.text_hash for k in env.render(target.problem, config)]
        except (msgspec.MsgspecError, ValueError, TypeError, StopIteration, RecursionError):
            return None
        if entry.problem() != target.problem or texts != [k.text_hash for k in entry.kernels] or not entry.median_us:
            return None
        if not isinstance(data.get("trials"), int) or data["trials"] < trials:
            return None
        found.append(BucketResult(target, _in_declared_order(env, entry), reused=True))
        finals[target] = data
    search = ClassSearch(
        env=env, problem=problem, members=tuple(members), searched=anchors(members, anchor_count), trials=trials
    )
    for target in members:
        search.times[target] = {}
        search.defaults[target] = env.default(target.problem, env.limits)
        stale = finals[target].get("stale")
        out = stale if isinstance(stale, list) else []
        search.recall((target, record) for number, record in env.store.load(target) if number not in out)
    first = finals[members[0]]
    search.duplicates = int(_number(first.get("duplicates")) or 0)
    return Reused(tuple(found), search, _number(first.get("bandwidth_gbs")))


def _number(value: object) -> float | None:
    """Return a positive number, None for anything else: a journal is a file that others may have edited."""
    return float(value) if isinstance(value, int | float) and 0 < value < 1e9 else None


def _in_declared_order(env: Environment, entry: AnyEntry) -> AnyEntry:
    """Return an entry as the search made it: a storage sorts the names of parameters, which are printed."""
    declared = {v.name: v for v in env.variants(entry.op)}

    def ordered(variant: str, params: Mapping[str, Any]) -> dict[str, Any]:
        names = [p.name for p in declared[variant].params] if variant in declared else []
        return {n: params[n] for n in (*(n for n in names if n in params), *(n for n in params if n not in names))}

    second = entry.runner_up
    if second is not None:
        second = msgspec.structs.replace(second, params=ordered(second.variant, second.params))
    return msgspec.structs.replace(entry, params=ordered(entry.variant, entry.params), runner_up=second)
