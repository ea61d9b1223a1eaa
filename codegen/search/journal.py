"""A journal file that survives ``kill -9`` at any point, and opening of any storage."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import BaseJournalBackend

from bole_codegen.search import database

#: How a record begins, as Optuna writes it: a last line that a killed writer left is a part of one.
_BEGIN = b'{"op_code":'
_ELSE = "give another file to --storage, or move it away"


class StorageError(RuntimeError):
    """The storage cannot be opened or read; the message says what to do."""


@contextlib.contextmanager
def _locked(path: Path, write: bool) -> Iterator[BinaryIO]:
    """Open a journal, alone or beside others that only read.

    The lock is on the journal itself and ends with the process: a killed one leaves nothing to wait for, while Optuna's
    own lock files have to grow old before another process may break them.
    """
    # Never created here: one that was deleted has lost what later records refer to.
    with open(path, "r+b" if write else "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX if write else fcntl.LOCK_SH)
        yield file


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("op_code")) is int else None


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
    if first and not (_record(first) if first.endswith(b"\n") else first.startswith(_BEGIN)):
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


def _last_lines(file: BinaryIO, size: int) -> tuple[bytes, bytes]:
    """Return the last whole line, empty where there is none, and what comes after it."""
    step = 4096
    while True:
        step = min(step, size)
        file.seek(size - step)
        *lines, tail = file.read(step).split(b"\n")
        # The first of the lines may have begun before what was read.
        if len(lines) > 1 or step == size:
            return (lines[-1] if lines else b""), tail
        step *= 2


def _cut(file: BinaryIO, path: Path, ours: bool) -> int:
    """Cut off a last line without an end; return the bytes cut.

    Args:
        file: open for writing, and locked.
        path: of it, for messages.
        ours: whether it is known to be a journal, or was empty when it was opened.

    Raises:
        StorageError: that line is no part of a record, and was left as it is.
    """
    size = file.seek(0, os.SEEK_END)
    whole, tail = _last_lines(file, size)
    if whole and _record(whole) is None:
        raise _foreign(path, "its last line is no record of one")
    if tail:
        if not (tail.startswith(_BEGIN) or ((whole or ours) and _BEGIN.startswith(tail))):
            raise _foreign(path, "its last line, which has no end, is no part of a record of one")
        file.truncate(size - len(tail))
    return len(tail)


def repair(path: Path) -> int:
    """Cut off a last line that a killed writer left unfinished; return the bytes cut.

    Raises:
        StorageError: the file is no journal, and was left as it is.
        OSError: it cannot be read or written.
    """
    check_journal(path)
    if not path.exists():
        return 0
    with _locked(path, write=True) as file:
        return _cut(file, path, ours=False)


class _JournalFile(BaseJournalBackend):
    """A file of records that other runs write too, any of which may be killed in the middle of a line.

    Optuna's own backend appends to whatever the last line is, so that one such kill makes the whole journal unreadable;
    it reads without a lock, which a line that is cut off and written anew would confuse; and it creates a file that was
    deleted anew.

    Args:
        path: of the file, which is created if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with open(path, "ab") as file:
            self._file = _identity(file)
        #: Byte at which each record begins that was met, and the next one.
        self._offsets = [0]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write records after the last whole line.

        Raises:
            StorageError: the file cannot be written, or is another one.
        """
        data = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        try:
            with _locked(self._path, write=True) as file:
                self._check(file)
                _cut(file, self._path, ours=True)
                file.seek(0, os.SEEK_END)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except FileNotFoundError as error:
            raise self._gone("was deleted") from error
        except OSError as error:
            raise StorageError(
                f"cannot write the journal {self._path}: {error}; what was finished before is kept in it, and the same "
                "command goes on from there"
            ) from error

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Return the records from one on; a last line without an end is none yet.

        Raises:
            StorageError: a line is no record, or the file cannot be read or is another one.
        """
        try:
            with _locked(self._path, write=False) as file:
                self._check(file)
                first = min(log_number_from, len(self._offsets) - 1)
                file.seek(self._offsets[first])
                *lines, _ = file.read().split(b"\n")
            for number, line in enumerate(lines, start=first):
                if (record := _record(line)) is None:
                    raise ValueError(f"line {number + 1} is no record")
                if number + 1 == len(self._offsets):
                    self._offsets.append(self._offsets[number] + len(line) + 1)
                if number >= log_number_from:
                    yield record
        except FileNotFoundError as error:
            raise self._gone("was deleted") from error
        except (OSError, ValueError) as error:
            raise StorageError(f"cannot read the journal {self._path}: {error}; {_ELSE}") from error

    def _check(self, file: BinaryIO) -> None:
        """Refuse a file that is not what was read before, at whose end other records would mean something else."""
        end = self._offsets[-1]
        if _identity(file) != self._file:
            raise self._gone("was replaced")
        file.seek(max(0, end - 1))
        if end and file.read(1) != b"\n":
            raise self._gone("was cut or overwritten")

    def _gone(self, how: str) -> StorageError:
        return StorageError(
            f"the journal {self._path} {how} while it was in use: finished evaluations that it no longer has are lost. "
            "Tables hold what was finished; the same command begins with what the journal has now"
        )


def _identity(file: IO[bytes]) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


def open_storage(where: str) -> BaseStorage:
    """Open a journal file (a path) or a database (an SQLAlchemy URL such as ``postgresql://...``).

    Raises:
        StorageError: it cannot be opened.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if "://" in where:
            try:
                return database.open_database(where)
            except Exception as error:
                kind = where.split("://", 1)[0]
                raise StorageError(
                    f"cannot open the {kind} storage: {database.opening(error, where)}; or give a file to --storage"
                ) from None
        path = Path(where).expanduser()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            repair(path)
            return JournalStorage(_JournalFile(path))
        except StorageError:
            raise
        except Exception as error:  # A record that is none of Optuna's may be anything.
            raise StorageError(f"cannot open the journal {where}: {error}; {_ELSE}") from error
