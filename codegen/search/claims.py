"""Which run searches which class, where several share one storage.

A claim is a study whose name nobody else can create: that is atomic in a journal and in a database. Its owner keeps
writing the time into it. A claim whose owner has stopped, or is a process of this host that is gone, is taken over by
the next in line.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any

from optuna.exceptions import DuplicatedStudyError
from optuna.storages import BaseStorage
from optuna.study import StudyDirection

#: Seconds between two signs of life, and after how many without one a claim is free.
BEAT = 10.0
LEASE = 60.0


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
    """Return the identity of this host since its last start."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{socket.gethostname()} {file.read().strip()}"
    except OSError:
        return socket.gethostname()


class Claims:
    """Claims of one run.

    Args:
        storage: shared with other runs.
    """

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage
        self._me = {"host": _host(), "pid": os.getpid(), "started": _started(os.getpid()), "run": uuid.uuid4().hex}
        self._held: dict[str, int] = {}
        self._first_seen: dict[str, float] = {}

    def take(self, name: str) -> bool:
        """Claim a class; return whether it is ours now.

        Args:
            name: of the class, with the hash of the space.
        """
        if name in self._held:
            return True
        number = 0
        while True:
            try:
                study = self._storage.create_new_study([StudyDirection.MINIMIZE], f"claim/{name}/{number}")
            except DuplicatedStudyError:
                if self._taken(f"claim/{name}/{number}"):
                    return False
                number += 1
                continue
            self._held[name] = study
            self._write(study, {**self._me, "beat": time.time()})
            return True

    def beat(self) -> None:
        """Say that this run is alive."""
        for study in self._held.values():
            self._write(study, {**self._me, "beat": time.time()})

    def release(self, name: str) -> None:
        """Give a class up, finished or not."""
        study = self._held.pop(name, None)
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
        for study in self._storage.get_all_studies():
            kind, _, numbered = study.study_name.partition("/")
            owner = study.user_attrs.get("owner")
            # What is not signed has no owner yet: it begins this moment, or died just then.
            if kind != "claim" or not of(numbered.rpartition("/")[0]) or not isinstance(owner, dict):
                continue
            if owner.get("run") != self._me["run"] and self._at_work(owner):
                host = str(owner.get("host"))
                where = "this machine" if host == self._me["host"] else host.split()[0]
                return f"process {owner.get('pid')} of {where}"
        return ""

    def _write(self, study: int, owner: dict[str, Any]) -> None:
        self._storage.set_study_user_attr(study, "owner", owner)

    def _taken(self, name: str) -> bool:
        """Return whether the owner of a claim may still be at work."""
        try:
            study = self._storage.get_study_id_from_name(name)
            owner = self._storage.get_study_user_attrs(study).get("owner")
        except KeyError:
            return False
        if not isinstance(owner, dict):
            # Created this moment by another, who has not signed it yet; or by one that died just then.
            return not self._grew_old(name)
        return self._at_work(owner)

    def _at_work(self, owner: dict[str, Any]) -> bool:
        """Return whether the owner of a claim holds it and may still be at work."""
        if owner.get("free"):
            return False
        if owner.get("host") == self._me["host"]:
            pid = owner.get("pid")
            return isinstance(pid, int) and owner.get("started") == _started(pid) != ""
        beat = owner.get("beat")
        return isinstance(beat, float | int) and time.time() - beat < LEASE

    def _grew_old(self, name: str) -> bool:
        return time.monotonic() - self._first_seen.setdefault(name, time.monotonic()) > BEAT
