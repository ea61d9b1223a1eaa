"""Figures of the HTML report, as SVG text."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bole_codegen.report.summary import bucket_name
from bole_codegen.search.class_search import ClassSearch
from bole_codegen.search.finish import BucketResult
from bole_codegen.search.kinds import kind_of
from bole_codegen.search.kinds import order as order_of
from bole_codegen.search.results import Timed
from bole_runtime.gpus import GpuRecord
from bole_runtime.tables.load import order

#: Histories drawn; a run of a hundred buckets would otherwise make a report nobody opens.
MAX_HISTORIES = 18
_TUNED, _DEFAULT, _FLOOR, _FAINT = "#1f5fa8", "#9a9a9a", "#111111", "#c9d6e8"


def _plain(text: str) -> str:
    """Keep matplotlib from reading mathematics into a label."""
    return text.replace("$", r"\$")


def _svg(figure: Any, salt: str) -> str:
    """Return a figure as an SVG element with identifiers of its own."""
    import matplotlib
    from matplotlib.figure import Figure

    assert isinstance(figure, Figure)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": "bole-tune"})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _figure(width: float, height: float) -> Any:
    # No pyplot: it keeps global state and picks a display backend.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def _plain_ticks(axis: Any, small: bool = False) -> None:
    """Label a logarithmic axis, whose limits are set, with ordinary numbers: a narrow one has few powers of ten."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    narrow = high < 10 * low
    axis.set_major_locator(MaxNLocator(4 if small else 8) if narrow else LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.set_tick_params(labelsize=6 if small else 8)


def before_after(results: Sequence[BucketResult]) -> str:
    """Draw default, tuned and floor of every bucket."""
    entries = sorted((r.entry for r in results if r.entry is not None), key=order, reverse=True)
    figure = _figure(9, 1.2 + 0.24 * len(entries))
    axes = figure.add_subplot()
    places = range(len(entries))
    both = [(i, e.default_us, e.median_us) for i, e in enumerate(entries) if e.default_us is not None]
    # One call a series: a call a bucket took longer than everything else of the report.
    axes.hlines([b[0] for b in both], [b[2] for b in both], [b[1] for b in both], color=_FAINT, linewidth=3, zorder=1)
    # Wider than what is tuned, so that it shows where both are the same.
    hollow = {"color": _DEFAULT, "markersize": 8, "markerfacecolor": "none"}
    axes.plot([b[1] for b in both], [b[0] for b in both], "o", label="analytic default", **hollow)
    axes.plot([e.median_us for e in entries], places, "o", color=_TUNED, markersize=5, label="tuned")
    axes.plot([e.floor_us for e in entries], places, "|", color=_FLOOR, markersize=10, label="memory floor")
    axes.set_yticks(range(len(entries)), [_plain(bucket_name(e)) for e in entries], fontsize=7)
    axes.set_ylim(-0.7, len(entries) - 0.3)
    axes.set_xscale("log")
    axes.set_xlabel("microseconds a layer")
    axes.grid(axis="x", color="#eeeeee")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=8, frameon=False)
    _plain_ticks(axes.xaxis)
    return _svg(figure, "before-after")


def roofline(results: Sequence[BucketResult], record: GpuRecord, bandwidth_gbs: float | None) -> str:
    """Draw achieved operations over operations a byte, under the roof of the GPU."""
    figure = _figure(7.5, 4.6)
    axes = figure.add_subplot()
    bandwidth = bandwidth_gbs or record.bandwidth_gbs
    groups: dict[str, tuple[list[float], list[float]]] = {}
    for result in results:
        if result.entry is None:
            continue
        problem = result.target.problem
        traffic = kind_of(problem).traffic(result.target)
        if not traffic.flops:
            continue  # It moves bytes only.
        xs, ys = groups.setdefault(kind_of(problem).brief(problem), ([], []))
        xs.append(traffic.flops / traffic.total)
        ys.append(traffic.flops / result.entry.median_us * 1e-6)
    for name, marker, color in zip(sorted(groups), "osDv", ("#1f5fa8", "#c8641b", "#2f8f5b", "#7a4fa3"), strict=False):
        axes.plot(*groups[name], marker, color=color, label=_plain(name), markersize=5, alpha=0.8)
    every = [x for xs, _ in groups.values() for x in xs] or [1.0]
    low, high = min(every) / 3, max(max(every) * 3, record.bf16_tflops * 1e3 / bandwidth * 2)
    points = [low * (high / low) ** (i / 60) for i in range(61)]
    roof = [min(record.bf16_tflops, bandwidth * x * 1e-3) for x in points]
    axes.plot(
        points,
        roof,
        color=_FLOOR,
        linewidth=1.2,
        label=f"roof: {bandwidth:.0f} GB/s, bf16 {record.bf16_tflops:.0f} TFLOP/s",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    _plain_ticks(axes.xaxis)
    _plain_ticks(axes.yaxis)
    axes.set_xlabel("useful operations a byte of the floor")
    axes.set_ylabel("useful TFLOP/s")
    axes.grid(color="#eeeeee")
    axes.legend(fontsize=8, frameon=False)
    return _svg(figure, "roofline")


def histories(searches: Sequence[ClassSearch]) -> str:
    """Draw the times of the candidates of each searched bucket, in the order tried, with the best so far."""
    series: list[tuple[str, list[float]]] = []
    for search in sorted(searches, key=lambda s: order_of(s.problem)):
        for target in search.searched:
            key = target.problem.key()
            times = [r.median_us for k, _, r in search.history if k == key and isinstance(r, Timed)]
            if len(times) > 1:
                series.append((kind_of(target.problem).title(target.problem), times))
    shown = series[:MAX_HISTORIES]
    if not shown:
        return ""
    from matplotlib.ticker import MaxNLocator

    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = _figure(3.3 * columns, 2.1 * rows)
    for i, (name, times) in enumerate(shown):
        axes = figure.add_subplot(rows, columns, i + 1)
        best, so_far = math.inf, []
        for t in times:
            best = min(best, t)
            so_far.append(best)
        order = range(1, len(times) + 1)
        axes.plot(order, times, ".", color=_DEFAULT, markersize=6, zorder=3)
        # Half a step to both sides, so that a single candidate has a line too.
        axes.step([0.5, *order, len(times) + 0.5], [so_far[0], *so_far, so_far[-1]], where="mid", color=_TUNED)
        axes.set_yscale("log")
        axes.set_ylim(0.95 * min(times), 1.05 * max(times))
        axes.set_title(_plain(name), fontsize=7)
        _plain_ticks(axes.yaxis, small=True)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.tick_params(axis="x", labelsize=6)
        axes.grid(color="#f2f2f2")
    # Not tight_layout, which draws everything once more.
    figure.subplots_adjust(left=0.07, right=0.99, bottom=0.5 / (2.1 * rows), top=1 - 0.3 / (2.1 * rows), hspace=0.4)
    figure.supxlabel("candidate", fontsize=8)
    figure.supylabel("microseconds a layer", fontsize=8)
    return _svg(figure, "histories")


def bars(weights: Mapping[str, Sequence[tuple[str, float]]]) -> str:
    """Draw the importance of parameters, a block of bars a variant."""
    shown = [(name, [w for w in parts if w[1] >= 0.01][:8]) for name, parts in weights.items()]
    shown = [(name, parts) for name, parts in shown if parts]
    if not shown:
        return "<p>No parameter alone explains the times.</p>"
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    deepest = max(len(parts) for _, parts in shown)
    figure = _figure(3.3 * columns, (0.7 + 0.2 * deepest) * rows)
    for i, (name, parts) in enumerate(shown):
        axes = figure.add_subplot(rows, columns, i + 1)
        places = range(len(parts))
        axes.barh(places, [w for _, w in parts], color=_TUNED, height=0.6)
        axes.set_yticks(places, [_plain(n) for n, _ in parts], fontsize=7)
        axes.set_ylim(deepest - 0.5, -0.5)
        axes.set_xlim(0, 1)
        axes.set_title(_plain(name), fontsize=7)
        axes.tick_params(axis="x", labelsize=6)
        axes.grid(axis="x", color="#f2f2f2")
        axes.set_axisbelow(True)
    figure.tight_layout()
    return _svg(figure, "importances")
