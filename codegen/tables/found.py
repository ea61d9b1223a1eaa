"""The tables of a GPU, a user's own and the shipped ones, as one set: which files are read, which entries count."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bole_runtime.gpus import GpuRecord
from bole_runtime.kernels.variants import all_variants
from bole_runtime.tables.load import CheckedEntry, LoadedTable, TableError, load_table
from bole_runtime.tables.lookup import tuned_roots
from bole_runtime.tables.words import entries


@dataclass(frozen=True)
class Read:
    """One table.

    Attributes:
        path: the first of its names.
        table: all that it has.
        entries: those that count: no table before this one has an entry of their key.
    """

    path: Path
    table: LoadedTable
    entries: tuple[CheckedEntry, ...]

    @property
    def behind(self) -> int:
        """Entries that do not count, since a table before this one has their keys."""
        return len(self.table.entries) - len(self.entries)

    @property
    def line(self) -> str:
        """How much it has."""
        behind = f", {self.behind} of them behind a table before it" if self.behind else ""
        return f"{entries(len(self.table.entries))}{behind}"


@dataclass(frozen=True)
class Found:
    """Tables of a GPU, own ones first.

    Attributes:
        tables: those that could be read.
        faults: a line for each that could not, or is of another GPU.
        skipped: a line for each that has entries which are not usable.
    """

    tables: tuple[Read, ...]
    faults: tuple[str, ...]
    skipped: tuple[str, ...]

    @property
    def entries(self) -> Iterator[CheckedEntry]:
        """Entries that count, each key once."""
        return (entry for one in self.tables for entry in one.entries)

    @property
    def line(self) -> str:
        """Which files were read."""
        return "read: " + (", ".join(f"{one.path} ({one.line})" for one in self.tables) or "no table")


def find_tables(record: GpuRecord, out: Path, only: bool = False) -> list[Path]:
    """Return the tables of a GPU: those under ``out``, then those that the runtime reads. Each file is there once,
    whatever names it has.

    Args:
        record: the GPU.
        out: folder of own tables.
        only: no others than those.
    """
    found: list[Path] = []
    seen: set[object] = set()
    for root in (out,) if only else (out, *tuned_roots()):
        for path in sorted((root / record.key).glob("*.json")):
            same = _identity(path)
            if same not in seen:
                seen.add(same)
                found.append(path)
    return found


def _identity(path: Path) -> object:
    """Return what two names of one file have in common."""
    try:
        info = os.stat(path)
    except OSError:  # A link to nothing: whoever reads it is told.
        return os.path.abspath(path)
    return info.st_dev, info.st_ino


def read_tables(record: GpuRecord, out: Path, only: bool = False) -> Found:
    """Read the tables of :func:`find_tables`. What cannot be read is a fault, and the others count.

    Args:
        record: the GPU.
        out: folder of own tables, which go before the others entry by entry.
        only: no others than those.
    """
    tables: list[Read] = []
    faults: list[str] = []
    skipped: list[str] = []
    seen: set[str] = set()
    for path in find_tables(record, out, only):
        try:
            table = load_table(path, all_variants)
        except TableError as error:
            faults.append(f"{error}; it is not used")
            continue
        if table.header.gpu.key != record.key:
            faults.append(f"table {path}: gpu.key: was made for {table.header.gpu.key!r}; it is not used")
            continue
        if table.skipped:
            field, reason = table.skipped[0]
            many = "is" if len(table.skipped) == 1 else "are"
            skipped.append(f"table {path}: {entries(len(table.skipped))} {many} not usable, first {field}: {reason}")
        tables.append(Read(path, table, tuple(e for e in table.entries if e.key not in seen)))
        seen |= {e.key for e in table.entries}
    return Found(tuple(tables), tuple(faults), tuple(skipped))
