"""``bole-tune --show``: the tables of a GPU as text or JSON."""

from __future__ import annotations

import msgspec

from bole_codegen.tables.found import Found
from bole_codegen.tables.stale import stale_entries


def show_text(found: Found) -> None:
    """Print tables for people: of each what it is, and the entries of it that count."""
    from bole_codegen.report.summary import results_table

    for one in found.tables:
        header = one.table.header
        measured = sum(e.entry.label == "measured" for e in one.entries)
        made = f"{header.gpu.device_name}, Triton {header.gpu.triton}, {header.date}"
        print(f"{one.path}: {made}, {one.line}, {measured} measured")
        print(results_table([e.entry for e in one.entries]))
        for stale in stale_entries(one.table):
            print(f"stale: {stale.key}: {stale.reason}")


def show_json(gpu: str, found: Found) -> None:
    """Print tables as one JSON document."""
    heads = [
        {
            "path": str(one.path),
            "gpu": one.table.header.gpu,
            "date": one.table.header.date,
            "entries": len(one.table.entries),
            "behind": one.behind,
        }
        for one in found.tables
    ]
    every = [e.entry for e in found.entries]
    data = {"gpu": gpu, "tables": heads, "faults": [*found.faults, *found.skipped], "entries": every}
    print(msgspec.json.encode(data).decode())
