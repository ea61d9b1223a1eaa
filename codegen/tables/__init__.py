"""Writing tables: merging under a lock, provenance, staleness. Reading and lookup live in ``bole_runtime.tables``."""

from __future__ import annotations

from bole_codegen.tables.provenance import gather, predicted_gpu
from bole_codegen.tables.stale import StaleEntry, stale_entries
from bole_codegen.tables.writer import LockTimeout, Merge, merge_entries

__all__ = [
    "LockTimeout",
    "Merge",
    "StaleEntry",
    "gather",
    "merge_entries",
    "predicted_gpu",
    "stale_entries",
]
