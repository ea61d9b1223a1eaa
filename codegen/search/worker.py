"""The child process that runs candidates, and may die of them.

A worker builds one *bench* object and answers calls of its methods until its pipe closes. On the way it says which
phase it is in. The parent keeps the time: a worker that hangs is killed, one that dies is replaced. Started as
``python -m bole_codegen.search.worker FD``: a program of its own, so that nothing of the parent's is imported or
inherited but the pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from bole_codegen.search import phases

_PR_SET_PDEATHSIG = 1


def load(factory: str) -> Any:
    """Import ``module:name``.

    Raises:
        ValueError: the text has another form.
    """
    module, sep, name = factory.partition(":")
    if not sep:
        raise ValueError(f"expected 'module:name', got {factory!r}")
    return getattr(importlib.import_module(module), name)


def _follow_parent() -> None:
    """Die with the parent, even while a kernel hangs, and leave Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _redirect(log: str) -> None:
    """Send everything printed here, by compilers in C++ too, to a file."""
    with contextlib.suppress(OSError):
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.close(handle)


def _call(bench: Any, method: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    from bole_codegen.search.results import CandidateError

    begun = time.monotonic()
    try:
        return ("ok", getattr(bench, method)(*args), time.monotonic() - begun)
    except CandidateError as error:
        return ("failed", error.kind, error.message[:1000], error.fatal)
    except Exception as error:
        # What is not foreseen may have left a device in any state.
        fatal = bool(getattr(bench, "uses_device", True))
        return ("failed", "error", f"{type(error).__name__}: {error}"[:1000], fatal)


def serve(pipe: Connection) -> None:
    """Serve calls: ``(method, args)`` in; ``("phase", name)``, then ``("ok", result, seconds)`` or
    ``("failed", kind, message, fatal)`` out."""
    _follow_parent()
    factory, options, log, path = pipe.recv()
    if log is not None:
        _redirect(log)
    sys.path[:] = path
    try:
        bench = load(factory)(**options)
    except BaseException as error:
        pipe.send(("broken", f"{type(error).__name__}: {error}"[:1000]))
        return
    pipe.send(("ready", os.getpid()))
    phases.connect(lambda phase: pipe.send(("phase", phase)))
    while True:
        try:
            method, args = pipe.recv()
        except (EOFError, OSError):
            return
        answer = _call(bench, method, args)
        try:
            pipe.send(answer)
        except OSError:
            return
        if answer[0] == "failed" and answer[3]:
            # A poisoned device context cannot even be torn down in order.
            pipe.close()
            os._exit(0)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
