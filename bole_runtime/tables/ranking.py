"""The entries of tables that could serve a problem, nearest first; ``lookup.py`` says in which order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Variant
from bole_runtime.tables.kinds import kind_of
from bole_runtime.tables.words import entries

if TYPE_CHECKING:
    from bole_runtime.tables.load import CheckedEntry, LoadedTable


class Tables:
    """Tables of some folders, each read when it is first asked for.

    Args:
        roots: folders with tables, in order.
        user_roots: how many of them come before the shipped ones.
        variants: op -> declared variants.
        warn: called with a kind and a text where a table is not used.
    """

    def __init__(
        self,
        roots: tuple[Path, ...],
        user_roots: int,
        variants: Callable[[str], Iterable[Variant]],
        warn: Callable[[str, str], None],
    ) -> None:
        self._roots = roots
        self._user_roots = user_roots
        self._variants = variants
        self._warn = warn
        self._tables: dict[tuple[Path, str, str], LoadedTable | None] = {}
        self._files: dict[tuple[str, str, str], Path] = {}

    def clear(self) -> None:
        """Forget every table read."""
        self._tables.clear()
        self._files.clear()

    def ranked(self, problem: Specialisation, keys: Iterable[str]) -> Iterator[tuple[str, CheckedEntry]]:
        """Yield (GPU key, entry), nearest first, whether or not an entry can run here.

        Args:
            problem: buckets and element types.
            keys: of the GPU and its stand-ins, in order.
        """
        late: list[tuple[str, CheckedEntry]] = []
        rank = kind_of(problem).rank
        for key in keys:
            found: list[tuple[tuple[float, ...], int, CheckedEntry]] = []
            for place, root in enumerate(self._roots):
                table = self._table(root, key, problem.table)
                for entry in table.entries if table else ():
                    # An operation is of one kind: problems of one class meet.
                    away = rank(problem, entry.problem) if entry.problem.op == problem.op else None
                    if away is not None:
                        found.append((away, place, entry))
            for _, place, entry in sorted(found, key=lambda f: f[:2]):
                if entry.entry.label == "predicted" and place >= self._user_roots:
                    late.append((key, entry))
                else:
                    yield key, entry
        yield from late

    def _table(self, root: Path, key: str, name: str) -> LoadedTable | None:
        place = (root, key, name)
        if place not in self._tables:
            from bole_runtime.tables.load import TableError, load_table, table_path

            table = None
            path = table_path(root, key, name)
            # A file that two folders hold by links counts in the first alone.
            if _is_there(path) and self._files.setdefault((os.path.realpath(path), key, name), root) == root:
                try:
                    table = load_table(path, self._variants)
                except TableError as error:
                    self._warn(f"file {path}", f"{error}; it is not used")
                if table is not None and table.header.gpu.key != key:
                    self._warn(f"file {path}", f"{path} was made for {table.header.gpu.key!r}; it is not used")
                    table = None
                if table is not None and table.skipped:
                    field, reason = table.skipped[0]
                    count = len(table.skipped)
                    many = f"{entries(count)} {'is' if count == 1 else 'are'}"
                    self._warn(f"file {path}", f"{path}: {many} not usable, first {field}: {reason}")
            self._tables[place] = table
        return self._tables[place]


def _is_there(path: Path) -> bool:
    """Return whether anything has the name of a table, which may be a folder or a link to nothing: reading it tells."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True
