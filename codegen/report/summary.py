"""Results as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import tabulate

from bole_codegen.search.kinds import kind_of
from bole_codegen.search.outcome import RunResult
from bole_codegen.search.results import KINDS
from bole_runtime.tables.load import order
from bole_runtime.tables.schema import AnyEntry
from bole_runtime.tables.words import counted

HEADERS = ("bucket", "default us", "tuned us", "floor us", "ratio", "error", "variant")


def bucket_name(entry: AnyEntry) -> str:
    """Return the part of a key that people tell buckets apart by."""
    problem = entry.problem()
    return kind_of(problem).bucket_name(problem)


def config_name(entry: AnyEntry) -> str:
    """Return the variant and its parameters on one line."""
    return entry.variant + " " + " ".join(f"{k}={v}" for k, v in entry.params.items())


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def row(entry: AnyEntry) -> tuple[str, ...]:
    """Return one line of the final table."""
    return (
        bucket_name(entry),
        _number(entry.default_us),
        _number(entry.median_us),
        _number(entry.floor_us),
        _number(entry.ratio),
        "-" if entry.error is None else f"{entry.error:.1e}",
        config_name(entry),
    )


def results_table(entries: Sequence[AnyEntry]) -> str:
    """Return entries as a text table, in order of their keys."""
    rows = [row(e) for e in sorted(entries, key=order)]
    return str(tabulate.tabulate(rows, headers=HEADERS, tablefmt="simple", disable_numparse=True))


def failures_line(failures: Mapping[str, int]) -> str:
    """Return the failed candidates by kind on one line."""
    if not failures:
        return "no candidate failed"
    known = [f"{failures[k]} {text}" for k, text in KINDS.items() if failures.get(k)]
    return "candidates that do not count: " + ", ".join(known)


def earlier_line(result: RunResult) -> str:
    """Say what a run took from earlier ones."""
    were = "was" if result.reused == 1 else "were"
    buckets = (
        f"; {result.reused} of {counted(len(result.buckets), 'bucket')} {were} finished by then"
        if result.reused
        else ""
    )
    return f"taken over from earlier runs: {counted(result.resumed, 'evaluation')}{buckets}"


def missing_lines(result: RunResult, asked: int) -> list[str]:
    """Say how many buckets have no entry, which, and why; no line when all have one.

    Args:
        result: of the run; of one that was interrupted, buckets that were not reached are not in it.
        asked: buckets of the run.
    """
    gone = asked - len(result.entries)
    lines = [f"{gone} of {counted(asked, 'bucket')} {'has' if gone == 1 else 'have'} no entry"] if gone else []
    reasons: dict[str, list[str]] = {}
    for bucket in result.buckets:
        if bucket.entry is None:
            reasons.setdefault(bucket.reason, []).append(bucket.target.problem.key())
    for reason, keys in reasons.items():
        more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        lines.append(f"no result for {', '.join(keys[:3])}{more}: {reason}")
    return lines


def offline_line(entries: Sequence[AnyEntry]) -> str:
    """Say what a search without the GPU came to: predictions change a default only where the model is sure."""
    changed = sum(e.default_us is not None and e.median_us < e.default_us for e in entries)
    broken = sum(e.default_us is None for e in entries)
    kept = len(entries) - changed - broken
    parts = (
        [f"the analytic default compiles for this GPU and is kept in {kept} of {counted(len(entries), 'bucket')}"]
        if kept
        else []
    )
    if changed:
        parts.append(f"something the model is sure is faster replaces it in {changed}")
    if broken:
        parts.append(f"it cannot run in {broken}, where another is chosen")
    lines = ["; ".join(parts) + ". Only a search on the GPU can tell apart what is closer than the model is sure of."]
    likely = [e for e in entries if e.runner_up is not None and e.runner_up.median_us < e.median_us]
    for entry in sorted(likely, key=order)[:8]:
        assert entry.runner_up is not None
        params = " ".join(f"{k}={v}" for k, v in entry.runner_up.params.items())
        lines.append(
            f"worth measuring in {bucket_name(entry)}: {entry.runner_up.variant} {params} "
            f"(predicted {entry.runner_up.median_us:.2f} us against {entry.median_us:.2f})"
        )
    return "\n".join(lines)


def as_json(
    result: RunResult, gpu: str, label: str, paths: Sequence[str], exhaustive: Mapping[str, object] | None = None
) -> str:
    """Return a run as one JSON document for other programs.

    Args:
        result: the run.
        gpu: key.
        label: ``measured`` or ``predicted``.
        paths: tables written.
        exhaustive: what came of trying everything, where that was asked for.
    """
    data: dict[str, Any] = {
        "gpu": gpu,
        "label": label,
        "tables": list(paths),
        "seconds": round(result.seconds, 1),
        "out_of_time": result.out_of_time,
        "candidates": result.tried,
        "resumed_evaluations": result.resumed,
        "finished_earlier": result.reused,
        "duplicates": result.duplicates,
        "failures": dict(result.failures),
        "where_the_time_went": dict(result.spent),
        "missing": [{"bucket": b.target.problem.key(), "reason": b.reason} for b in result.buckets if b.entry is None],
        "entries": [{"key": e.key(), **msgspec.to_builtins(e)} for e in result.entries],
    }
    if exhaustive is not None:
        data["exhaustive"] = dict(exhaustive)
    return json.dumps(data, indent=2)
