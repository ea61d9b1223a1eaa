"""A bench whose calls fail as told. Light to import, so that a worker starts at once."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from bole_codegen.search import phases
from bole_codegen.search.results import CandidateError


def fail(how: str) -> None:
    """Fail in one of the ways that candidates do."""
    if how == "raise":
        raise ValueError("planted")
    if how == "exit":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        time.sleep(600)
    if how == "wait":
        phases.enter("wait")
        time.sleep(600)
    if how == "poison":
        raise CandidateError("illegal", "an illegal memory access was encountered", fatal=True)
    raise CandidateError(how, "planted")


class Bench:
    """Answers with what it is asked, unless told to fail."""

    def __init__(self, broken: str = "") -> None:
        if broken:
            raise RuntimeError(broken)

    def do(self, what: str) -> Any:
        if what.startswith("fail "):
            fail(what.removeprefix("fail "))
        if what.startswith("slow "):
            phases.enter("compile")
            time.sleep(float(what.removeprefix("slow ")))
        if what == "print":
            os.write(1, b"printed by a candidate\n")
        return what
