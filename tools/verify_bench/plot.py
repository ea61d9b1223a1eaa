"""The roofline: achieved bandwidth over the arithmetic intensity, and time over the memory floor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bole_codegen.measure import verify_traffic
from verify_bench.rows import Row

COLOURS = {"fast": "#1b6ca8", "lossless": "#c2571a"}
PEER_COLOUR = "#777777"


def roofline(
    rows: Sequence[Row], bandwidth_gbs: float, title: str, path: Path, peak_tflops: float | None = None
) -> None:
    """Write a PNG (or what the suffix of ``path`` says).

    Left: achieved rate over operations a byte, under the copy bandwidth's slope and, if known, the matrix units' peak.
    Right: microseconds a layer over the floor, with the floor as the diagonal.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no row has a time.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in rows:
        traffic = verify_traffic(row.point.workload, captured=row.point.factors == "captured")
        floor = traffic.floor_us(bandwidth_gbs)
        for name, result in row.results.items():
            if result.us is not None:
                rate = traffic.flops / result.us * 1e-6
                points.setdefault(name, []).append((traffic.flops / traffic.total, rate, floor, result.us))
    if not points:
        raise ValueError("no row has a time, so there is nothing to plot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), constrained_layout=True)
    intensities = [x for series in points.values() for x, *_ in series]
    low, high = min(intensities) / 2, max(intensities) * 2
    ends = [low, high]
    slope = [bandwidth_gbs * 1e-3 * x for x in ends]
    if peak_tflops is not None:
        slope = [min(s, peak_tflops) for s in slope]
        left.axhline(peak_tflops, color="black", linewidth=0.8, linestyle=":", label=f"{peak_tflops:.0f} TFLOP/s")
    left.plot(ends, slope, color="black", linewidth=1, label=f"copy bandwidth {bandwidth_gbs:.0f} GB/s")
    floors = [f for series in points.values() for _, _, f, _ in series]
    span = [min(floors) / 1.5, max(floors) * 1.5]
    right.plot(span, span, color="black", linewidth=1, label="memory floor")
    for name, series in points.items():
        colour = COLOURS.get(name.split("@")[0], PEER_COLOUR)
        marker = "o" if name in COLOURS else ("x" if name.split("@")[0] in COLOURS else "s")
        left.scatter([p[0] for p in series], [p[1] for p in series], color=colour, marker=marker, label=name, s=28)
        right.scatter([p[2] for p in series], [p[3] for p in series], color=colour, marker=marker, label=name, s=28)
    left.set(xlabel="least operations / least bytes", ylabel="least operations / time (TFLOP/s)", title="Roofline")
    right.set(xlabel="memory floor (us a layer)", ylabel="time (us a layer)", title="Time over the floor")
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.grid(True, which="both", linewidth=0.3, alpha=0.5)
        axis.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
