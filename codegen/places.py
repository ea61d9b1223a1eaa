"""Where a search writes, refused before it begins where it could not, or would put one file in the place of another."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from bole_codegen.arguments import UsageError
from bole_codegen.report.html import is_report
from bole_runtime.gpus import GpuRecord
from bole_runtime.tables.checks import cache_dir


@dataclass(frozen=True)
class Files:
    """Where a run writes beside its tables.

    Attributes:
        storage: a journal file or a database URL.
        log: what workers print.
        report: the report, or None.
    """

    storage: str
    log: str
    report: Path | None


def files_of(args: argparse.Namespace, record: GpuRecord) -> Files:
    """Return where a run writes, with an empty log.

    Args:
        args: of the command line.
        record: the GPU.

    Raises:
        UsageError: two would share a place.
    """
    folder = cache_dir() / "search"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = folder / f"{record.key}-workers.log"
    log.unlink(missing_ok=True)
    report = None if args.no_report else args.report or args.out / record.key / "report.html"
    storage = args.storage or str(folder / f"{record.key}.journal")
    check_places(args.out / record.key, storage, report)
    return Files(storage, str(log), report)


def check_report(path: Path, option: str) -> None:
    """Refuse a report that cannot be written: not at the end of a search.

    Raises:
        UsageError: it cannot.
    """
    if path.is_dir():
        raise UsageError(f"{option}: {path} is a folder; name a file, such as {path / 'report.html'}")
    if path.exists() and not path.is_file():
        raise UsageError(f"{option}: {path} is no regular file; --no-report writes none")
    if path.exists() and not is_report(path):
        raise UsageError(f"{option}: {path} holds something else than a report, and keeps it; name another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option}: cannot make the folder of {path}: {error}") from error
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{option}: {path.parent} cannot be written to; --no-report writes none")


def check_places(tables: Path, storage: str, report: Path | None) -> None:
    """Refuse a storage or a report in the place of a table, or of one another.

    Args:
        tables: folder of the tables.
        storage: a journal file or a database URL.
        report: the report, or None.

    Raises:
        UsageError: two would share a place.
    """
    places = [("--storage", Path(storage))] if "://" not in storage else []
    places += [("--report", report)] if report is not None else []
    for option, path in places:
        if path.suffix == ".json" and path.resolve().parent == tables.resolve():
            raise UsageError(f"{option}: {path} is where a table goes; name another file")
    if len(places) == 2 and places[0][1].resolve() == places[1][1].resolve():
        raise UsageError(f"--report: {report} is the storage; name another file")
