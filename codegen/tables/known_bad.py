"""The search's side of the lists of known-bad kernels: what it must not try again, what it adds."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bole_codegen.search.results import BAD_KINDS, Failed
from bole_codegen.tables.writer import locked, real_file, write_atomically
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config
from bole_runtime.tables.bad import BAD_VERSION, AnyBad, BadFile, bad_path, load_bad, new_bad, place_of


class KnownBad:
    """The lists of one GPU under one Triton version, read from several folders, written to the first.

    Args:
        roots: folders with tables; the first takes what this run finds.
        gpu: key.
        triton: version.
        fresh: try again what is on the lists.
    """

    def __init__(self, roots: Sequence[Path], gpu: str, triton: str, fresh: bool = False) -> None:
        self._path = bad_path(roots[0], gpu, triton)
        self._gpu, self._triton = gpu, triton
        # By text too: one folder may list a kernel of before, another that of today.
        self._known: dict[tuple[tuple[object, ...], tuple[str, ...]], AnyBad] = {}
        self._new: dict[tuple[object, ...], AnyBad] = {}
        self._good: set[tuple[object, ...]] = set()
        for root in () if fresh else roots:
            found = load_bad(bad_path(root, gpu, triton))
            for entry in found.entries if found is not None else ():
                self._known.setdefault((entry.place(), tuple(entry.kernels)), entry)

    @property
    def added(self) -> int:
        """Entries that this run found."""
        return len(self._new)

    def find(self, problem: Specialisation, config: Config, texts: Sequence[str]) -> Failed | None:
        """Return how a candidate failed before; a kernel whose text has changed since counts as new."""
        entry = self._known.get((place_of(problem, config), tuple(texts)))
        if entry is None or entry.kind not in BAD_KINDS:
            return None
        return Failed(entry.kind, f"known since {entry.date}: {entry.message}"[:400])

    def add(self, problem: Specialisation, config: Config, texts: Sequence[str], failed: Failed) -> None:
        """Note a candidate that failed; its entry takes the place of one for another text."""
        place = place_of(problem, config)
        if (place, tuple(texts)) in self._known:
            return
        self._new[place] = new_bad(
            problem,
            variant=config.variant,
            params=config.as_dict(),
            kernels=list(texts),
            kind=failed.kind,
            message=re.sub(r"[\x00-\x1f\x7f]+", " ", failed.message)[:200],
            date=datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        )

    def clear(self, problem: Specialisation, config: Config) -> None:
        """Note a candidate that passed: it is taken off the list."""
        self._good.add(place_of(problem, config))

    def save(self) -> Path | None:
        """Merge what was found into the list; return the file, None when there is nothing to write."""
        if not self._new and not (self._good and self._path.exists()):
            return None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with locked(real_file(self._path).parent):
            old = load_bad(self._path)
            merged = {e.place(): e for e in old.entries} if old is not None else {}
            before = dict(merged)
            merged.update(self._new)
            for place in self._good - set(self._new):
                merged.pop(place, None)
            if merged == before:
                return None
            entries = sorted(merged.values(), key=lambda e: repr(e.place()))
            write_atomically(self._path, dump_bad(BadFile(
                schema_version=BAD_VERSION, gpu=self._gpu, triton=self._triton, entries=entries,
            )))  # fmt: skip
        return self._path


def dump_bad(file: BadFile) -> bytes:
    """Return the bytes of a list: one entry a line, so that a diff reads."""
    lines = [msgspec.json.encode(e).decode() for e in file.entries]
    head = f'{{"schema_version": {file.schema_version}, "gpu": "{file.gpu}", "triton": "{file.triton}", "entries": ['
    return (head + "\n" + ",\n".join(lines) + "\n]}\n").encode()
