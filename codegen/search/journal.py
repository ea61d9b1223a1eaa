"""A journal file that survives ``kill -9`` at any point, and opening of any storage."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend

#: How a record begins, as Optuna writes it: a last line that a killed writer left is a part of one.
_BEGIN = b'{"op_code":'
_ELSE = "give another file to --storage, or move it away"


class StorageError(RuntimeError):
    """The storage cannot be opened or read; the message says what to do."""


class KernelLock:
    """A lock that the operating system drops with its process, so that a killed one leaves nothing to wait for.

    Optuna's own lock files have to grow old before another process may break them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + ".lock")
        self._handle: int | None = None

    def acquire(self) -> bool:
        """Wait for the lock."""
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        """Give the lock back."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _is_record(line: bytes) -> bool:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and type(record.get("op_code")) is int


def _foreign(path: Path, why: str) -> StorageError:
    return StorageError(f"{path} is no journal of bole-tune: {why}. Nothing was written to it; {_ELSE}")


def check_journal(path: Path) -> None:
    """Refuse a file that is no journal, by its first line, without touching it.

    Raises:
        StorageError: it is none.
        OSError: it cannot be read.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise _foreign(path, "it is no regular file")
    with open(path, "rb") as file:
        first = file.readline(1 << 20)
    # The only line may be unfinished.
    if first and not (_is_record(first) if first.endswith(b"\n") else first.startswith(_BEGIN)):
        raise _foreign(path, "its first line is no record of one")


def check_storage(where: str) -> None:
    """Refuse a journal file that is none, before anything else is made ready. Databases are not looked at.

    Raises:
        StorageError: it is none, or cannot be read.
    """
    if "://" in where:
        return
    try:
        check_journal(Path(where).expanduser())
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"cannot open the journal {where}: {error}; {_ELSE}") from error


def _last_lines(path: Path, size: int) -> tuple[bytes, bytes]:
    """Return the last whole line, empty where there is none, and what comes after it."""
    step = 4096
    with open(path, "rb") as file:
        while True:
            step = min(step, size)
            file.seek(size - step)
            *lines, tail = file.read(step).split(b"\n")
            # The first of the lines may have begun before what was read.
            if len(lines) > 1 or step == size:
                return (lines[-1] if lines else b""), tail
            step *= 2


def repair(path: Path) -> int:
    """Cut off a last line that a killed writer left unfinished; return the bytes cut.

    Without this, the next line would be written onto it and the journal could not be read again.

    Raises:
        StorageError: the file is no journal, and was left as it is.
    """
    check_journal(path)
    if not path.exists():
        return 0
    lock = KernelLock(path)
    lock.acquire()
    try:
        size = path.stat().st_size
        whole, tail = _last_lines(path, size)
        if whole and not _is_record(whole):
            raise _foreign(path, "its last line is no record of one")
        if tail:
            if not (tail.startswith(_BEGIN) or (whole and _BEGIN.startswith(tail))):
                raise _foreign(path, "its last line, which has no end, is no part of a record of one")
            os.truncate(path, size - len(tail))
        return len(tail)
    finally:
        lock.release()


class _JournalFile(JournalFileBackend):
    """Reads lines that something else wrote to the file meanwhile as an error with a name."""

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        """Return the records from one on.

        Raises:
            StorageError: one is none.
        """
        try:
            for record in super().read_logs(log_number_from):
                if not (isinstance(record, dict) and "op_code" in record):
                    raise ValueError("a line is no record")
                yield record
        except ValueError as error:
            raise StorageError(f"cannot read the journal {self._file_path}: {error}; {_ELSE}") from error


def _with_driver(url: str) -> str:
    """Name the PostgreSQL driver that is installed where a URL names none: SQLAlchemy's default differs by version."""
    scheme, rest = url.split("://", 1)
    if scheme not in ("postgresql", "postgres"):
        return url
    for driver in ("psycopg", "psycopg2"):
        if importlib.util.find_spec(driver) is not None:
            return f"postgresql+{driver}://{rest}"
    return f"postgresql://{rest}"


def _open_database(url: str) -> BaseStorage:
    from optuna.storages import RDBStorage

    for again in range(5):
        try:
            return RDBStorage(url)
        except Exception as error:
            # Two runs that begin at once both create the tables, and one of them fails.
            if again == 4 or type(error).__name__ not in ("IntegrityError", "ProgrammingError"):
                raise
            time.sleep(0.5 * (again + 1))
    raise AssertionError


def open_storage(where: str) -> BaseStorage:
    """Open a journal file (a path) or a database (an SQLAlchemy URL such as ``postgresql://...``).

    Raises:
        StorageError: it cannot be opened.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if "://" in where:
            try:
                return _open_database(_with_driver(where))
            except Exception as error:
                # A URL may hold a password: name the kind of storage only.
                kind = where.split("://", 1)[0]
                driver = " (pip install '.[postgresql]' in a checkout)" if kind.startswith("postgres") else ""
                raise StorageError(
                    f"cannot open the {kind} storage ({type(error).__name__}); check the URL and its driver{driver}, "
                    "or give a file to --storage"
                ) from None
        path = Path(where).expanduser()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            repair(path)
            lock: Any = KernelLock(path)
            return JournalStorage(_JournalFile(str(path), lock))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise StorageError(f"cannot open the journal {where}: {error}; {_ELSE}") from error
