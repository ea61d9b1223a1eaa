"""A journal file that survives ``kill -9`` at any point, and opening of any storage."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import time
import warnings
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend


class StorageError(RuntimeError):
    """The storage cannot be opened; the message says what to do."""


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


def repair(path: Path) -> int:
    """Cut off a last line that a killed writer left unfinished; return the bytes cut.

    Without this, the next line would be written onto it and the journal could not be read again.
    """
    if not path.exists():
        return 0
    lock = KernelLock(path)
    lock.acquire()
    try:
        with open(path, "rb+") as file:
            size = file.seek(0, os.SEEK_END)
            keep = size
            while keep > 0:
                step = min(4096, keep)
                file.seek(keep - step)
                newline = file.read(step).rfind(b"\n")
                if newline >= 0:
                    keep = keep - step + newline + 1
                    break
                keep -= step
            if keep != size:
                file.truncate(keep)
            return size - keep
    finally:
        lock.release()


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
            return JournalStorage(JournalFileBackend(str(path), lock))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise StorageError(
                f"cannot open the journal {where}: {error}; give another file to --storage, or move it away"
            ) from error
