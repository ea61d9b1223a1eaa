"""``bole-tune --show``: the tables of a GPU as text or JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from bole_codegen.tables.stale import stale_entries
from bole_runtime.gpus import GpuRecord
from bole_runtime.kernels.variants import all_variants
from bole_runtime.tables.load import load_table
from bole_runtime.tables.lookup import tuned_roots


def find_tables(record: GpuRecord, out: Path) -> list[Path]:
    """Return the tables of a GPU: those under ``out``, else those that the runtime would read."""
    for root in (out, *tuned_roots()):
        found = sorted((root / record.key).glob("*.json"))
        if found:
            return found
    return []


def show_tables(record: GpuRecord, out: Path, as_json: bool) -> int:
    """Print the tables of a GPU, as text or as one JSON document; return an exit status."""
    from bole_codegen.report.summary import results_table

    paths = find_tables(record, out)
    if not paths:
        stand_in = f"; the runtime uses those of {', '.join(record.tables_from)}" if record.tables_from else ""
        print(f"bole-tune: no table for {record.key} in {out} or shipped{stand_in}", file=sys.stderr)
        return 1
    tables = [(path, load_table(path, all_variants)) for path in paths]
    if as_json:
        heads = [
            {"path": str(p), "gpu": t.header.gpu, "date": t.header.date, "entries": len(t.entries)} for p, t in tables
        ]
        every = [e.entry for _, table in tables for e in table.entries]
        print(msgspec.json.encode({"gpu": record.key, "tables": heads, "entries": every}).decode())
        return 0
    for path, table in tables:
        entries = [e.entry for e in table.entries]
        gpu = table.header.gpu
        measured = sum(e.label == "measured" for e in entries)
        made = f"{gpu.device_name}, Triton {gpu.triton}, {table.header.date}"
        print(f"{path}: {made}, {len(entries)} entries, {measured} measured")
        print(results_table(entries))
        for stale in stale_entries(table):
            print(f"stale: {stale.key}: {stale.reason}")
    return 0
