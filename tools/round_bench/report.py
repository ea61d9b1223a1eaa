"""Rows of the round benchmark, as people read them and as files hold them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_args import write_whole


@dataclass
class RoundRow:
    """One way to run a round at one point.

    Attributes:
        batch: requests.
        nodes: nodes a request.
        what: policy, or name of the peer.
        us: microseconds of a whole round, all layers; None if it was not timed.
        spread_us: third minus first quartile over the blocks.
        bytes: that the round must move.
        workspace: bytes beyond the states.
        error: of the states against the float64 recurrence after one round.
        status: ``ok``, or why there is no time.
    """

    batch: int
    nodes: int
    what: str
    us: float | None = None
    spread_us: float | None = None
    bytes: float | None = None
    workspace: int | None = None
    error: float | None = None
    status: str = "ok"


def cells(row: RoundRow, rows: Sequence[RoundRow], bandwidth_gbs: float | None) -> dict[str, str]:
    """Return the table's cells of a row; ratios are over the peer's row of the same point, and over the floor."""
    peer = next((r for r in rows if (r.batch, r.nodes, r.what) == (row.batch, row.nodes, "sglang")), None)
    floor = None if not bandwidth_gbs or row.bytes is None else row.bytes / bandwidth_gbs * 1e-3
    out = {"B": str(row.batch), "N": str(row.nodes), "round": row.what}
    out["us"] = "-" if row.us is None else f"{row.us:.1f}"
    out["spread"] = "-" if row.spread_us is None else f"{row.spread_us:.1f}"
    timed = peer is not None and peer is not row and peer.us is not None and row.us is not None
    out["x sglang"] = f"{peer.us / row.us:.1f}x" if timed else "-"  # type: ignore[union-attr, operator]
    out["MB"] = "-" if row.bytes is None else f"{row.bytes / 1e6:.0f}"
    out["/floor"] = "-" if floor is None or row.us is None else f"{row.us / floor:.2f}"
    out["workspace MB"] = "-" if row.workspace is None else f"{row.workspace / 1e6:.1f}"
    out["error"] = "-" if row.error is None else f"{row.error:.1e}"
    return out


def format_table(rows: Sequence[RoundRow], bandwidth_gbs: float | None) -> str:
    """Return the whole table with notes on what has no time."""
    if not rows:
        return "no rows"
    lines = [cells(row, rows, bandwidth_gbs) for row in rows]
    widths = {name: max(len(name), *(len(line[name]) for line in lines)) for name in lines[0]}
    table = ["  ".join(name.rjust(w) for name, w in widths.items())]
    table += ["  ".join(line[name].rjust(w) for name, w in widths.items()) for line in lines]
    notes = [f"B{r.batch} N{r.nodes} {r.what}: {r.status}" for r in rows if r.status != "ok"]
    return "\n".join([*table, *notes])


def save(rows: Sequence[RoundRow], record: dict[str, Any], csv_path: Path | None, json_path: Path | None) -> None:
    """Write the files, each at once, so that a run that is ended leaves whole ones."""
    if json_path is not None:
        write_whole(json_path, json.dumps({"provenance": record, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    if csv_path is not None:
        out = io.StringIO()
        writer = csv.DictWriter(out, list(asdict(rows[0])) if rows else ["what"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(r) for r in rows)
        write_whole(csv_path, out.getvalue())
