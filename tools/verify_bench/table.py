"""The table people read, and the files that a killed run leaves complete."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_args import write_whole

from verify_bench.rows import Result, Row
from verify_bench.targets import peer_verdict

#: Profile to the words of its columns.
PROFILES = ("fast", "lossless")


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _time(result: Result | None) -> str:
    if result is None:
        return "-"
    if result.us is None:
        # The cause is in the notes under the table; a cell holds only its first words.
        return result.status.split(":")[0][:16]
    return f"{result.us:.1f}" if result.us >= 10 else f"{result.us:.2f}"


def _error(result: Result | None, fp32: bool = False) -> str:
    value = None if result is None else (result.error_fp32 if fp32 else result.error)
    return "-" if value is None else f"{value:.1e}"


def cells(row: Row) -> dict[str, str]:
    """Return the main table's cells of a row."""
    p = row.point
    out = {"family": p.family, "B": str(p.batch), "N": str(p.nodes), "shape": p.shape}
    out.update(state=p.state_dtype, gates=p.gates)
    for name in row.peers:
        out[f"{name} us"] = _time(row.results.get(name))
    for profile in PROFILES:
        result = row.best(profile)
        if result is None:
            continue
        out[f"{profile} us"] = _time(result)
        ratio = row.ratio(profile)
        out[f"{profile} x"] = "-" if ratio is None else f"{ratio:.1f}x"
        over = row.over_floor(profile)
        out[f"{profile}/floor"] = _number(over, 2)
    out["floor us"] = _number(row.floor_us, 2)
    if row.peers:
        out[f"err {row.peers[0]}"] = _error(row.serial)
    for profile in PROFILES:
        if row.best(profile) is not None:
            out[f"err {profile}"] = _error(row.best(profile))
            out[f"err32 {profile}"] = _error(row.best(profile), fp32=True)
    out["layers"] = f"{row.layers}{'' if row.cold else ' warm'}"
    return out


def detail_cells(row: Row) -> list[dict[str, str]]:
    """Return one row a Bole candidate: what was dispatched, its scratch, spread and host time."""
    rows = []
    for name, result in row.results.items():
        rows.append(
            {
                "B": str(row.point.batch),
                "N": str(row.point.nodes),
                "candidate": f"{name} ({result.includes})" if result.includes else name,
                "us": _time(result),
                "spread": _number(result.spread_us, 2),
                "err": _error(result),
                "err32": _error(result, fp32=True),
                "workspace": f"{result.workspace_bytes:,}",
                "launches": "-" if result.launches is None else str(result.launches),
                "host us": _number(result.host_us),
                "first call s": _number(result.first_call_s, 2),
                "dispatched": result.variant,
            }
        )
    return rows


def round_cells(row: Row) -> dict[str, str]:
    """Return the round's parts: tree build, commit, and their sum with verify."""
    out = {
        "B": str(row.point.batch),
        "N": str(row.point.nodes),
        "shape": row.point.shape,
        "state": row.point.state_dtype,
    }
    out["build us (a round)"] = _number(row.build_us, 2)
    for profile, result in row.commit.items():
        out[f"commit {profile} us"] = _time(result)
        over = None if result.us is None or not row.commit_floor_us else result.us / row.commit_floor_us
        out[f"commit {profile}/floor"] = _number(over, 2)
        out[f"commit {profile} err"] = _error(result)
        out[f"round {profile} us"] = _number(row.round_us(profile), 1)
    out["commit floor us"] = _number(row.commit_floor_us, 2)
    return out


def format_table(rows: Sequence[dict[str, str]]) -> str:
    """Format rows as a table, with tabulate where it is installed."""
    if not rows:
        return ""
    headers = list(dict.fromkeys(key for row in rows for key in row))
    body = [[row.get(h, "") for h in headers] for row in rows]
    try:
        from tabulate import tabulate
    except ImportError:
        widths = [max(len(h), *(len(r[i]) for r in body)) for i, h in enumerate(headers)]
        lines = [headers, ["-" * w for w in widths], *body]
        return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
    return str(tabulate(body, headers=headers, tablefmt="simple", disable_numparse=True, stralign="right"))


def verdict_lines(rows: Sequence[Row]) -> list[str]:
    """Return one line for every target that a row is judged by."""
    lines = []
    for row in rows:
        for profile in PROFILES:
            text = row.verdict(profile)
            if text:
                ratio = row.ratio(profile)
                shown = "-" if ratio is None else f"{ratio:.1f}x"
                lines.append(f"  {where(row)} {profile}: {shown} {text}")
        for name in row.peers:
            text = peer_verdict(row, name)
            if text:
                lines.append(f"  {where(row)} {text}")
    return lines


def where(row: Row) -> str:
    """Return the sizes of a point, short."""
    point = row.point
    return f"B{point.batch} N{point.nodes} {point.shape}"


def note_lines(row: Row) -> list[str]:
    """Return everything that kept a number out of the table."""
    lines = [f"  {row.point.title}: {row.note}"] if row.note else []
    for name, result in [*row.results.items(), *((f"commit {p}", r) for p, r in row.commit.items())]:
        if result.status != "ok":
            lines.append(f"  {row.point.title}: {name}: {result.status}")
    return lines


def save(rows: Sequence[Row], provenance: dict[str, Any], csv_path: Path | None, json_path: Path | None) -> None:
    """Write all rows so far. Called after every row."""
    if csv_path is not None:
        flat = [row.flat() for row in rows]
        headers = list(dict.fromkeys(key for record in flat for key in record))
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, headers, lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        write_whole(csv_path, buffer.getvalue())
    if json_path is not None:
        record = {"provenance": provenance, "rows": [row.to_json() for row in rows]}
        write_whole(json_path, json.dumps(record, indent=1) + "\n")
