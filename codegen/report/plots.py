"""Figures of the HTML report that stand alone, as SVG text."""

from __future__ import annotations

from collections.abc import Sequence

from bole_codegen.report.summary import bucket_name
from bole_codegen.report.svg import DEFAULT, FAINT, FLOOR, TUNED, new_figure, plain, plain_ticks, to_svg
from bole_codegen.search.finish import BucketResult
from bole_codegen.search.kinds import kind_of
from bole_runtime.gpus import GpuRecord
from bole_runtime.tables.load import order


def before_after(results: Sequence[BucketResult]) -> str:
    """Draw default, tuned and floor of every bucket."""
    entries = sorted((r.entry for r in results if r.entry is not None), key=order, reverse=True)
    figure = new_figure(9, 1.2 + 0.24 * len(entries))
    axes = figure.add_subplot()
    places = range(len(entries))
    both = [(i, e.default_us, e.median_us) for i, e in enumerate(entries) if e.default_us is not None]
    # One call a series: a call a bucket took longer than everything else of the report.
    axes.hlines([b[0] for b in both], [b[2] for b in both], [b[1] for b in both], color=FAINT, linewidth=3, zorder=1)
    # Wider than what is tuned, so that it shows where both are the same.
    hollow = {"color": DEFAULT, "markersize": 8, "markerfacecolor": "none"}
    axes.plot([b[1] for b in both], [b[0] for b in both], "o", label="analytic default", **hollow)
    axes.plot([e.median_us for e in entries], places, "o", color=TUNED, markersize=5, label="tuned")
    axes.plot([e.floor_us for e in entries], places, "|", color=FLOOR, markersize=10, label="memory floor")
    axes.set_yticks(range(len(entries)), [plain(bucket_name(e)) for e in entries], fontsize=7)
    axes.set_ylim(-0.7, len(entries) - 0.3)
    axes.set_xscale("log")
    axes.set_xlabel("microseconds a layer")
    axes.grid(axis="x", color="#eeeeee")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=8, frameon=False)
    plain_ticks(axes.xaxis)
    return to_svg(figure, "before-after")


def roofline(results: Sequence[BucketResult], record: GpuRecord, bandwidth_gbs: float | None) -> str:
    """Draw achieved operations over operations a byte, under the roof of the GPU."""
    figure = new_figure(7.5, 4.6)
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
        axes.plot(*groups[name], marker, color=color, label=plain(name), markersize=5, alpha=0.8)
    every = [x for xs, _ in groups.values() for x in xs] or [1.0]
    low, high = min(every) / 3, max(max(every) * 3, record.bf16_tflops * 1e3 / bandwidth * 2)
    points = [low * (high / low) ** (i / 60) for i in range(61)]
    roof = [min(record.bf16_tflops, bandwidth * x * 1e-3) for x in points]
    axes.plot(
        points,
        roof,
        color=FLOOR,
        linewidth=1.2,
        label=f"roof: {bandwidth:.0f} GB/s, bf16 {record.bf16_tflops:.0f} TFLOP/s",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)
    axes.set_xlabel("useful operations a byte of the floor")
    axes.set_ylabel("useful TFLOP/s")
    axes.grid(color="#eeeeee")
    axes.legend(fontsize=8, frameon=False)
    return to_svg(figure, "roofline")
