"""The simulation as a table, as CSV and as a figure."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from budget_sim.policies import Result


def by_policy(results: Sequence[Result]) -> dict[str, dict[int, Result]]:
    """Group results: policy -> batch -> result, in the order of appearance."""
    made: dict[str, dict[int, Result]] = {}
    for r in results:
        made.setdefault(r.policy, {})[r.batch] = r
    return made


def text(results: Sequence[Result]) -> str:
    """Return tokens per second by batch and policy, with the nodes that the adaptive ones used."""
    groups = by_policy(results)
    batches = sorted({r.batch for r in results})
    rows = []
    for batch in batches:
        row: list[object] = [batch]
        for name, group in groups.items():
            r = group[batch]
            row.append(f"{r.tokens_per_second:,.0f}" + ("" if name.startswith("fixed") else f" (N {r.mean_nodes:.1f})"))
        rows.append(row)
    return tabulate(rows, headers=["batch", *groups], stralign="right", disable_numparse=True)


def write_csv(results: Sequence[Result], path: Path) -> None:
    """Write one row a batch and policy."""
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["batch", "policy", "tokens_per_second", "tokens_per_request", "nodes_per_request", "round_us"])
        for r in results:
            out.writerow(
                [r.batch, r.policy, f"{r.tokens_per_second:.1f}", f"{r.mean_tokens:.4f}", f"{r.mean_nodes:.3f}",
                 f"{r.time_us / r.rounds:.1f}"]
            )  # fmt: skip


def plot(results: Sequence[Result], title: str, path: Path) -> None:
    """Write a figure: throughput against plain decoding, and the nodes used, by batch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = by_policy(results)
    base = groups["fixed 1"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), constrained_layout=True)
    fixed = [n for n in groups if n.startswith("fixed")]
    greys = [str(0.75 - 0.6 * i / max(1, len(fixed) - 1)) for i in range(len(fixed))]
    colours = dict(zip(fixed, greys, strict=True)) | {"goodput": "#c2571a", "goodput, uncorrected": "#e3a877"}
    for name, group in groups.items():
        batches = sorted(group)
        adaptive = name not in fixed
        style = {
            "color": colours.get(name, "#1b6ca8"),
            "label": name,
            "linestyle": "-" if adaptive else "--",
            "linewidth": 2.2 if adaptive else 1.2,
            "marker": "o",
            "markersize": 4 if adaptive else 2.5,
        }
        left.plot(batches, [group[b].tokens_per_second / base[b].tokens_per_second for b in batches], **style)
        if adaptive:
            right.plot(batches, [group[b].mean_nodes for b in batches], **style)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("batch")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    left.axhline(1.0, color="black", linewidth=0.8)
    left.set(ylabel="throughput / plain decoding", title="Throughput")
    right.set(ylabel="nodes a request", title="Budget", yscale="log")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
