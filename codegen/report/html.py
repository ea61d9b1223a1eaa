"""The HTML report: one file, no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from bole_codegen.report import plots
from bole_codegen.report.summary import HEADERS, row
from bole_codegen.search.driver import RunResult
from bole_codegen.search.results import KINDS
from bole_codegen.tables.writer import write_atomically
from bole_runtime.gpus import GpuRecord

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #1a1a1a; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.2rem 0.7rem 0.2rem 0; border-bottom: 1px solid #e6e6e6; vertical-align: top; }
td.n { text-align: right; } .wide { overflow-x: auto; } .note { color: #555; }
svg { max-width: 100%; height: auto; }
"""


def _cells(values: Sequence[str]) -> str:
    numeric = range(1, 6)
    return "".join(
        f'<td class="n">{html.escape(v)}</td>' if i in numeric else f"<td>{html.escape(v)}</td>"
        for i, v in enumerate(values)
    )


def _table(headers: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{html.escape(h)}</th>" for h in headers)
    body = "\n".join(f"<tr>{r}</tr>" for r in rows)
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}\n</table></div>'


def _facts(facts: Mapping[str, str]) -> str:
    rows = [f"<th>{html.escape(k)}</th><td>{html.escape(v)}</td>" for k, v in facts.items() if v]
    return "<table>" + "".join(f"<tr>{r}</tr>" for r in rows) + "</table>"


def render_report(
    result: RunResult, record: GpuRecord, label: str, facts: Mapping[str, str], bandwidth_gbs: float | None
) -> str:
    """Return the report of a run as one HTML document. Everything that is not markup is escaped.

    Args:
        result: the run.
        record: the GPU.
        label: ``measured`` or ``predicted``.
        facts: software, options, paths: shown as they are.
        bandwidth_gbs: measured copy bandwidth, None for the nominal one.
    """
    entries = sorted(result.entries, key=lambda e: e.problem())
    missing = [b for b in result.buckets if b.entry is None]
    parts = [
        f"<h1>bole-tune: {html.escape(record.title)}, {html.escape(label)}</h1>",
        _facts(facts),
    ]
    if label == "predicted":
        parts.append(
            '<p class="note">Nothing ran: kernels were compiled for this GPU and ranked by a roofline model. '
            "Times are estimates for comparing configurations with each other.</p>"
        )
    if entries:
        parts += [
            "<h2>Results</h2>",
            _table(HEADERS, [_cells(row(e)) for e in entries]),
            "<h2>Before and after</h2>",
            plots.before_after(result.buckets),
            "<h2>Roofline</h2>",
            plots.roofline(result.buckets, record, bandwidth_gbs),
        ]
    history = plots.histories(result.searches)
    if history:
        parts += [
            "<h2>Search</h2>",
            '<p class="note">Each dot is a candidate in the order tried, the line is the best so far. '
            f"At most {plots.MAX_HISTORIES} searched buckets are drawn.</p>",
            history,
        ]
    parts.append("<h2>Candidates</h2>")
    parts.append(
        f"<p>{result.tried} compiled and checked, {result.duplicates} more rendered to kernels already tried, "
        f"{result.resumed} evaluations taken over from earlier runs, {result.seconds:.0f} s.</p>"
    )
    if result.failures:
        rows = [
            f"<td>{html.escape(KINDS.get(k, k))}</td><td>{n}</td>"
            for k, n in sorted(result.failures.items(), key=lambda f: -f[1])
        ]
        parts.append(_table(("candidates that do not count", "number"), rows))
    if missing:
        rows = [f"<td>{html.escape(b.target.problem.key())}</td><td>{html.escape(b.reason)}</td>" for b in missing]
        parts += ["<h2>Buckets without a result</h2>", _table(("bucket", "reason"), rows)]
    body = "\n".join(parts)
    title = html.escape(f"bole-tune {record.key}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def write_report(
    path: Path,
    result: RunResult,
    record: GpuRecord,
    label: str,
    facts: Mapping[str, str],
    bandwidth_gbs: float | None = None,
) -> None:
    """Write :func:`render_report` to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render_report(result, record, label, facts, bandwidth_gbs).encode())
