"""Rows of the engine benchmark, and the table."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_POOL = re.compile(r"intermediate_ssm_state_cache size: ([\d.]+)GB.*?intermediate_conv_window_cache size: ([\d.]+)GB")
_SPARED = re.compile(r"bole: no snapshots")


@dataclass(frozen=True)
class Row:
    """One engine at one batch size.

    Attributes:
        run: engine and nodes.
        batch: requests.
        tokens_s: new tokens a second of all requests, prefill included.
        decode_tokens_s: without prefill.
        aimed: tokens a round that the drafts were aimed at, "" where they were left alone.
        accepted: tokens a round and request.
        phases_ms: medians of GPU time by phase, over all accepted lengths of the run.
        snapshots_gb: states and windows a node that SGLang allocated.
        same: requests whose text is the recorded one, in all tokens.
        equal_tokens: tokens before the first difference, in all requests.
        tokens: in all requests.
    """

    run: str
    engine: str
    nodes: int
    batch: int
    tokens_s: float
    decode_tokens_s: float
    aimed: str
    accepted: float
    phases_ms: dict[str, float]
    snapshots_gb: float | None
    same: int
    equal_tokens: int
    tokens: int
    texts: list[list[int]]

    @classmethod
    def of(
        cls, run: str, engine: str, nodes: int, row: dict[str, Any], times: dict[str, Any], want: list[list[int]],
        batches: Sequence[int], log: Path,
    ) -> Row:  # fmt: skip
        """Make a row of what a process wrote."""
        batch = row["batch"]
        first = sum(batches[: list(batches).index(batch)])
        recorded = want[first : first + batch]
        equal = [_equal(a, b) for a, b in zip(row["texts"], recorded, strict=False)]
        found = _POOL.search(log.read_text(errors="replace"))
        snapshots = None if found is None else float(found[1]) + float(found[2])
        if _SPARED.search(log.read_text(errors="replace")):
            snapshots = 0.0
        decode = row["tokens"] - batch
        return cls(
            run, engine, nodes, batch, row["tokens"] / row["seconds"],
            decode / max(row["seconds"] - row["prefill_seconds"], 1e-9),
            row.get("aimed", ""),
            row["tokens"] / row["rounds"],
            _steps(times, batch),
            snapshots, sum(e == len(t) for e, t in zip(equal, row["texts"], strict=False)), sum(equal),
            row["tokens"], row["texts"],
        )  # fmt: skip


def _steps(times: dict[str, Any], batch: int) -> dict[str, float]:
    """Return the phases of rounds with that many requests; prompts are read in a mode of their own."""
    parts = {tuple(n.split("/")): t for n, t in times.items()}
    return {phase: t["ms"] for (phase, mode, rows), t in parts.items() if mode != "EXTEND" and rows == str(batch)}


def _equal(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def format_rows(rows: Sequence[Row]) -> str:
    """Return a table; speed is also over SGLang's own tree of the same nodes, batch and accepted tokens."""
    from tabulate import tabulate

    trees = {(r.nodes, r.batch, r.aimed): r.tokens_s for r in rows if r.engine == "tree"}
    names = list(dict.fromkeys(p for r in rows for p in r.phases_ms))
    lines = []
    for r in rows:
        base = trees.get((r.nodes, r.batch, r.aimed))
        over = f"{r.tokens_s / base:.2f}x" if base else ""
        phases = [f"{r.phases_ms[n]:.2f}" if n in r.phases_ms else "" for n in names]
        snapshots = "" if r.snapshots_gb is None else f"{r.snapshots_gb:.1f}"
        lines.append(
            [r.run, r.batch, f"{r.tokens_s:.0f}", over, f"{r.accepted:.2f}", *phases, snapshots,
             f"{r.same}/{r.batch}", f"{r.equal_tokens}/{r.tokens}"]
        )  # fmt: skip
    heads = ["run", "batch", "tokens/s", "over tree", "accepted", *(f"{n} ms" for n in names), "snapshots GB"]
    return tabulate(lines, [*heads, "texts equal", "tokens equal"], disable_numparse=True)


def save_rows(path: Path, rows: Sequence[Row], settings: dict[str, Any]) -> None:
    """Write rows and settings as JSON."""
    path.write_text(json.dumps({"settings": settings, "rows": [asdict(r) for r in rows]}, default=str, indent=1))
