"""The parent's side of the workers: time limits, deaths, replacements."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from bole_codegen.search.results import Failed

#: Seconds for a worker to import torch and open the device.
START_LIMIT = 180.0


class WorkerStartError(RuntimeError):
    """Workers do not start at all: no candidate is to blame, so the search cannot go on."""


@dataclass(frozen=True)
class Job:
    """One call of a bench method.

    Attributes:
        method: name.
        args: picklable arguments.
        limit: seconds; a worker that needs longer is killed.
        tag: handed back with the answer.
    """

    method: str
    args: tuple[Any, ...]
    limit: float
    tag: Any = None


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection
    ready: bool = False
    job: Job | None = None
    deadline: float = field(default=0.0)


class Pool:
    """Workers that each run one job at a time. A worker that dies, hangs or is poisoned is replaced.

    Args:
        factory: ``module:name`` of the bench class.
        options: its arguments; picklable.
        count: workers.
        log: file that takes what workers print; their own output otherwise.

    Use as a context manager, or call :meth:`close`.
    """

    def __init__(self, factory: str, options: dict[str, Any], count: int = 1, log: str | None = None) -> None:
        self._factory = factory
        self._options = options
        self._count = max(1, count)
        self._log = log
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self.restarts = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start every worker without waiting for it."""
        while len(self._workers) < self._count:
            self._workers.append(self._spawn())

    def call(self, method: str, *args: Any, limit: float) -> Any:
        """Run one job and return its result, or a :class:`Failed`."""
        return self.run([Job(method, args, limit)])[0]

    def run(
        self,
        jobs: Iterable[Job],
        done: Callable[[Job, Any], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> list[Any]:
        """Run jobs on all workers.

        Args:
            jobs: what to run.
            done: called with each job and its result or :class:`Failed`, as they finish.
            stop: asked before a job is handed out; once true, no more are, and the rest get None.

        Returns:
            Results in the order of ``jobs``.

        Raises:
            WorkerStartError: workers die before they are ready.
        """
        todo = list(enumerate(jobs))
        results: list[Any] = [None] * len(todo)
        todo.reverse()
        active: dict[int, int] = {}

        def finish(worker: _Worker, result: Any) -> None:
            job, worker.job = worker.job, None
            assert job is not None
            results[active.pop(id(worker))] = result
            if done is not None:
                done(job, result)

        self.start()
        while todo or active:
            if todo and stop is not None and stop():
                todo.clear()
                continue
            for worker in self._workers:
                if todo and worker.ready and worker.job is None:
                    number, job = todo.pop()
                    active[id(worker)] = number
                    self._send(worker, job)
            self._step(finish)
        return results

    def close(self) -> None:
        """End every worker."""
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            idle = worker.ready and worker.job is None
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(1.0 if idle else 0.0)
            _kill(worker.process)
        self._workers = []

    def _spawn(self) -> _Worker:
        mine, theirs = socket.socketpair()
        with mine, theirs:
            command = [sys.executable, "-m", "bole_codegen.search.worker", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            pipe = Connection(mine.detach())
        worker = _Worker(process, pipe, deadline=time.monotonic() + START_LIMIT)
        with contextlib.suppress(OSError):
            pipe.send((self._factory, self._options, self._log, sys.path))
        return worker

    def _send(self, worker: _Worker, job: Job) -> None:
        worker.job = job
        worker.deadline = time.monotonic() + job.limit
        with contextlib.suppress(OSError):  # One that died while idle is seen by the next step.
            worker.pipe.send((job.method, job.args))

    def _step(self, finish: Callable[[_Worker, Any], None]) -> None:
        """Wait for the next event of any worker and handle it."""
        now = time.monotonic()
        limits = [w.deadline for w in self._workers if w.job is not None or not w.ready]
        timeout = max(0.0, min(limits) - now) if limits else 1.0
        ready = wait([w.pipe for w in self._workers], timeout)
        now = time.monotonic()
        for place, worker in enumerate(self._workers):
            if worker.pipe in ready:
                self._receive(place, worker, finish)
            elif worker.deadline <= now and (worker.job is not None or not worker.ready):
                limit = worker.job.limit if worker.job else START_LIMIT
                self._replace(place, worker, Failed("hang", f"no answer within {limit:g} s"), finish)

    def _receive(self, place: int, worker: _Worker, finish: Callable[[_Worker, Any], None]) -> None:
        try:
            answer: Sequence[Any] = worker.pipe.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(5)
            code = worker.process.returncode
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            self._replace(place, worker, Failed("crash", f"the process died ({how})"), finish)
            return
        if answer[0] == "ready":
            worker.ready = True
            self._failed_starts = 0
        elif answer[0] == "broken":
            raise WorkerStartError(f"a worker could not start: {answer[1]}")
        elif answer[0] == "ok":
            finish(worker, answer[1])
        else:
            failed = Failed(str(answer[1]), str(answer[2]))
            if answer[3]:
                self._replace(place, worker, failed, finish)
            else:
                finish(worker, failed)

    def _replace(self, place: int, worker: _Worker, failed: Failed, finish: Callable[[_Worker, Any], None]) -> None:
        worker.pipe.close()
        _kill(worker.process)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= 3:
                raise WorkerStartError(
                    f"three workers in a row died before they were ready; the last: {failed.message}"
                )
        if worker.job is not None:
            finish(worker, failed)
        self.restarts += 1
        self._workers[place] = self._spawn()


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
