"""The HTML report: one file, no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from bole_codegen.report import panels, plots
from bole_codegen.report.importance import importances
from bole_codegen.report.summary import HEADERS, earlier_line, row
from bole_codegen.search.ledger import PHASES
from bole_codegen.search.outcome import RunResult
from bole_codegen.search.results import KINDS
from bole_codegen.tables.writer import write_atomically
from bole_runtime.gpus import GpuRecord
from bole_runtime.tables.load import order
from bole_runtime.tables.schema import AnyEntry
from bole_runtime.tables.words import counted

_BEGIN = "<!doctype html>"
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #1a1a1a; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.2rem 0.7rem 0.2rem 0; border-bottom: 1px solid #e6e6e6; vertical-align: top; }
th, .n, .wide td:first-child { white-space: nowrap; } .n { text-align: right; }
.wide { overflow-x: auto; margin-top: 0.8rem; } .note { color: #555; }
.facts td { overflow-wrap: anywhere; } .wide td:nth-child(7) { min-width: 24rem; }
.panels { display: flex; flex-wrap: wrap; gap: 1rem; } .panels > svg { max-width: 100%; height: auto; }
"""

#: How a bucket's name reads.
_LEGEND = (
    "A bucket: operation, family, dk x dv, g value heads a key head, type of q, k, v / of the state, gates, precision, "
    "n nodes, p tokens of a pending chain, w = requests x value heads; of a convolution operation, channels x taps, "
    "l inputs of a state, types, what there is of bias and SiLU, n, p, w = requests. The floor is the time to move the "
    "memory that must move; the ratio is tuned to floor."
)


def _gain(entries: Sequence[AnyEntry]) -> str:
    """Say in how many buckets the search beat the analytic default."""
    better = sum(e.default_us is not None and e.median_us < e.default_us for e in entries)
    broken = sum(e.default_us is None for e in entries)
    also = f", which cannot run in {broken} more" if broken else ""
    return f"Faster than the analytic default in {better} of {counted(len(entries), 'bucket')}{also}."


def _line(tag: str, values: Sequence[str], numeric: Collection[int]) -> str:
    """Return a row; the columns of numbers are aligned to the right."""
    cells = (
        f'<{tag} class="n">{html.escape(v)}</{tag}>' if i in numeric else f"<{tag}>{html.escape(v)}</{tag}>"
        for i, v in enumerate(values)
    )
    return f"<tr>{''.join(cells)}</tr>"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], numeric: Collection[int] = ()) -> str:
    body = "\n".join(_line("td", r, numeric) for r in rows)
    return _wide(f"<table>{_line('th', headers, numeric)}\n{body}\n</table>")


def _wide(content: str) -> str:
    """Let what is wider than the page scroll."""
    return f'<div class="wide">{content}</div>'


def _facts(facts: Mapping[str, str]) -> str:
    rows = [f"<th>{html.escape(k)}</th><td>{html.escape(v)}</td>" for k, v in facts.items() if v]
    return '<table class="facts">' + "".join(f"<tr>{r}</tr>" for r in rows) + "</table>"


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
    entries = sorted(result.entries, key=order)
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
            f'<p class="note">{_LEGEND}</p>',
            _table(HEADERS, [row(e) for e in entries], range(1, 6)),
            f"<p>{_gain(entries)}</p>",
            "<h2>Before and after</h2>",
            _wide(plots.before_after(result.buckets)),
            "<h2>Roofline</h2>",
            _wide(plots.roofline(result.buckets, record, bandwidth_gbs)),
        ]
    history = panels.histories(result.searches)
    if history:
        parts += [
            "<h2>Search</h2>",
            '<p class="note">Each dot is a candidate that counts, in the order tried; the line is the best so far. '
            f"At most {panels.MAX_HISTORIES} searched buckets are drawn.</p>",
            history,
        ]
    weights = importances(result.searches)
    if weights:
        parts += [
            "<h2>Parameters</h2>",
            '<p class="note">The part of the spread of (log) times that a parameter explains alone, mean over the '
            "searched buckets. Parameters that depend on each other share theirs.</p>",
            panels.bars(weights),
        ]
    parts.append("<h2>Candidates</h2>")
    done = "compiled" if label == "predicted" else "compiled and checked"
    parts.append(
        f"<p>{result.tried} {done}, {result.duplicates} more rendered to kernels already tried. "
        f"This run took {result.seconds:.0f} s.</p>"
    )
    if result.resumed:
        line = earlier_line(result)
        parts.append(f"<p>{line[0].upper()}{line[1:]}.</p>")
    if result.spent:
        rows = [(PHASES[k], f"{result.spent[k]:.1f}") for k in PHASES if result.spent.get(k, 0) >= 0.05]
        if "device_idle" in result.spent:
            rows.append(("device idle, of the wall time", f"{result.spent['device_idle']:.1f}"))
        parts.append(_table(("where the time of this run went, all processes together", "seconds"), rows, {1}))
    if result.failures:
        rows = [(KINDS.get(k, k), str(n)) for k, n in sorted(result.failures.items(), key=lambda f: -f[1])]
        parts.append(_table(("candidates that do not count", "number"), rows, {1}))
    if missing:
        rows = [(b.target.problem.key(), b.reason) for b in missing]
        parts += ["<h2>Buckets without a result</h2>", _table(("bucket", "reason"), rows)]
    body = "\n".join(parts)
    title = html.escape(f"bole-tune {record.key}")
    return (
        f'{_BEGIN}\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def is_report(path: Path) -> bool:
    """Return whether a file is empty or begins as a report does."""
    with open(path, "rb") as file:
        return file.read(len(_BEGIN)) in (b"", _BEGIN.encode())


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
    # A path may hold bytes that are no text.
    text = render_report(result, record, label, facts, bandwidth_gbs)
    write_atomically(path, text.encode(errors="backslashreplace"))
