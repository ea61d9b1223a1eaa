"""A storage that does not answer is waited for; when it stays away, the search ends and says how to go on.

A server that is restarted is gone for some seconds, in which hours of measuring must not be lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from optuna.exceptions import DuplicatedStudyError
from optuna.storages import BaseStorage, RDBStorage

from bole_codegen.search import database
from bole_codegen.search.journal import StorageError

T = TypeVar("T")

#: Seconds that a storage may be away.
PATIENCE = 60.0
#: Seconds between two tries, the last again and again.
WAITS = (0.25, 0.5, 1.0, 2.0, 4.0)


class Deleted(StorageError):
    """What was asked for was in the storage before, and is not there any more."""


class Patience:
    """Asks a storage again until it answers, on behalf of every thread of a run.

    Args:
        storage: that is asked.

    Attributes:
        note: told in one line when it has to be waited for.
        answered: since when it has answered, of ``time.monotonic``: who was silent before may have had no way to speak.
    """

    def __init__(self, storage: BaseStorage) -> None:
        rdb = storage if isinstance(storage, RDBStorage) else None
        self._url: object = "" if rdb is None else rdb.engine.url
        self._name = "journal" if rdb is None else f"{rdb.engine.dialect.name} storage"
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._away: float | None = None
        self._given_up = ""
        self.note: Callable[[str], None] = lambda text: None
        self.answered = time.monotonic()

    def stop(self) -> None:
        """Wait no more: what fails is tried once."""
        self._stopped.set()

    def __call__(self, ask: Callable[[], T]) -> T:
        """Return what the storage answers.

        Args:
            ask: asks it. It may be called again after it was done, where the answer was lost.

        Raises:
            StorageError: it does not answer, or cannot. From then on it is not asked any more.
            Deleted: it has no such thing.
            DuplicatedStudyError: as the storage raises it.
        """
        tries, begun = 0, time.monotonic()
        while True:
            if self._given_up:
                raise StorageError(self._given_up)
            try:
                found = ask()
            except (StorageError, DuplicatedStudyError):
                raise
            except KeyError as error:
                raise Deleted(
                    "what this search had kept was deleted from the storage while it ran, by a run with --fresh or by "
                    "someone; the same command begins anew"
                ) from error
            except Exception as error:  # Of any kind, where what others wrote is not as Optuna expects it.
                if not database.may_pass(error):
                    raise self._lost("cannot be used", "when that is mended", error) from error
                away = self._fail(error)
                # From its own first try too: another thread may get answers all the while.
                if max(away, time.monotonic() - begun) >= PATIENCE or self._stopped.is_set():
                    raise self._lost(f"has not answered for {away:.0f} s", "once it answers", error) from error
            else:
                self._succeed()
                return found
            self._stopped.wait(WAITS[min(tries, len(WAITS) - 1)])
            tries += 1

    def _fail(self, error: Exception) -> float:
        """Return for how many seconds the storage has been away."""
        now = time.monotonic()
        with self._lock:
            first = self._away is None
            self._away = now if self._away is None else self._away
            away = now - self._away
        if first and not self._stopped.is_set():
            self.note(f"the {self._name} does not answer ({database.reason(error, self._url)}): waiting for it")
        return away

    def _succeed(self) -> None:
        with self._lock:
            if self._away is not None:
                self._away, self.answered = None, time.monotonic()

    def _lost(self, how: str, then: str, error: Exception) -> StorageError:
        # Once and for all: many that wait must not each wait in turn.
        self._given_up = (
            f"the {self._name} {how} ({database.reason(error, self._url)}). What was finished before is kept in it: "
            f"{then}, the same command goes on from there"
        )
        return StorageError(self._given_up)
