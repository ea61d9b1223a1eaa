"""Which run searches which class, where several share one storage.

A claim is a study whose name nobody else can create: that is atomic in a journal and in a database. Its owner keeps
writing signs of life into it. A claim whose owner is a process of this host that is gone, or one that was silent for
long, is taken over by the next in line, under the next number. Of two that come to think a class theirs, say since one
was stopped for minutes, the one with the higher number has it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from optuna.exceptions import DuplicatedStudyError
from optuna.storages import BaseStorage
from optuna.study import StudyDirection

from bole_codegen.search.patience import Deleted, Patience

#: Seconds between two signs of life, and after how many without one a claim is free: only when a run that cannot reach
#: the storage has given up, which it does after :data:`~bole_codegen.search.patience.PATIENCE` and a last try.
BEAT = 10.0
LEASE = 120.0


def _started(pid: int) -> str:
    """Return when a process of this host was started, in the kernel's ticks; empty if it is gone.

    A process that has ended is gone, even while its parent has not asked for its exit status.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return "" if fields[0] in ("Z", "X") else fields[19]
    except (OSError, IndexError):
        return ""


def _host() -> str:
    """Return the identity of this host since its last start, and of the container: each has its own process ids."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{socket.gethostname()} {file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _claim(name: str, number: int) -> str:
    return f"claim/{name}/{number}"


class Claims:
    """Claims of one run.

    Args:
        storage: shared with other runs.
        ask: waits for it.
    """

    def __init__(self, storage: BaseStorage, ask: Patience | None = None) -> None:
        self._storage = storage
        self._ask = ask or Patience(storage)
        self._me = {"host": _host(), "pid": os.getpid(), "started": _started(os.getpid()), "run": uuid.uuid4().hex}
        self._held: dict[str, tuple[int, int]] = {}
        #: What was last seen in a claim, and since when it has said just that.
        self._seen: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()

    def take(self, name: str) -> bool:
        """Claim a class; return whether it is ours now.

        Args:
            name: of the class, with the hash of the space.
        """
        if name in self._held:
            return True
        number = 0
        while self._find(name, number) is not None:
            number += 1
        if number and self._taken(name, number - 1):
            return False
        try:
            study = self._ask(lambda: self._storage.create_new_study([StudyDirection.MINIMIZE], _claim(name, number)))
        except DuplicatedStudyError:
            return False
        self._held[name] = study, number
        self._sign(study)
        # Of two, either may have been stopped between looking and writing.
        if self.holds(name) and not (number and self._taken(name, number - 1)):
            return True
        self.release(name)
        return False

    def holds(self, name: str) -> bool:
        """Return whether a class that was ours still is: nobody took it over while this run was silent."""
        return self._find(name, self._held[name][1] + 1) is None

    def beat(self) -> None:
        """Say that this run is alive."""
        for name in list(self._held):
            with self._lock:
                if name in self._held:
                    self._sign(self._held[name][0])

    def release(self, name: str) -> None:
        """Give a class up, finished or not."""
        with self._lock:
            study, _ = self._held.pop(name, (None, 0))
            if study is not None:
                self._write(study, {"free": True})

    def release_all(self) -> None:
        """Give everything up."""
        for name in list(self._held):
            self.release(name)

    def others(self, of: Callable[[str], bool]) -> str:
        """Return which other run works on a class, in words; empty when none does.

        Args:
            of: whether a class matters, by the name that it is claimed by.
        """
        last: dict[str, tuple[int, object]] = {}
        for study in self._ask(self._storage.get_all_studies):
            kind, _, numbered = study.study_name.partition("/")
            name, _, number = numbered.rpartition("/")
            if kind == "claim" and number.isdecimal() and of(name):
                last[name] = max(
                    last.get(name, (-1, None)), (int(number), study.user_attrs.get("owner")), key=lambda c: c[0]
                )
        for _, owner in last.values():
            # What is not signed has no owner yet: it begins this moment, or died just then.
            if isinstance(owner, dict) and owner.get("run") != self._me["run"] and self._may_work(owner):
                host = str(owner.get("host"))
                where = "this machine" if host == self._me["host"] else host.partition(" ")[0]
                return f"process {owner.get('pid')} of {where}"
        return ""

    def _sign(self, study: int) -> None:
        self._write(study, {**self._me, "beat": time.time()})

    def _write(self, study: int, owner: dict[str, Any]) -> None:
        self._ask(lambda: self._storage.set_study_user_attr(study, "owner", owner))

    def _find(self, name: str, number: int) -> int | None:
        try:
            return self._ask(lambda: self._storage.get_study_id_from_name(_claim(name, number)))
        except Deleted:
            return None

    def _taken(self, name: str, number: int) -> bool:
        """Return whether the owner of a claim may still be at work."""
        study = self._find(name, number)
        if study is None:
            return False
        try:
            owner = self._ask(lambda: self._storage.get_study_user_attrs(study)).get("owner")
        except Deleted:
            return False
        silent = self._silent(_claim(name, number), owner)
        if not isinstance(owner, dict):
            # Created this moment by another, who has not signed it yet; or by one that died just then.
            return silent < BEAT
        here = self._at_work_here(owner)
        return silent < LEASE if here is None else here

    def _at_work_here(self, owner: dict[str, Any]) -> bool | None:
        """Return whether the owner of a claim holds it and is at work, None when that cannot be seen from here."""
        if owner.get("free"):
            return False
        if owner.get("host") != self._me["host"] or not self._me["started"]:
            return None
        pid = owner.get("pid")
        return isinstance(pid, int) and owner.get("started") == _started(pid) != ""

    def _may_work(self, owner: dict[str, Any]) -> bool:
        """Return whether the owner of a claim may be at work, by its own clock: it is seen but once."""
        here, beat = self._at_work_here(owner), owner.get("beat")
        return isinstance(beat, float | int) and time.time() - beat < LEASE if here is None else here

    def _silent(self, claim: str, owner: object) -> float:
        """Return for how many seconds a claim has said the same, as far as this run could see.

        By the clock of this run: that of another host may be minutes off.
        """
        now, text = time.monotonic(), repr(owner)
        said, since = self._seen.get(claim, ("", now))
        self._seen[claim] = text, since if said == text else now
        return now - max(self._seen[claim][1], self._ask.answered)
