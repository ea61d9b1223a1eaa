"""The parent's side of the workers: time limits by phase, deaths, replacements. One event loop serves every pool."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from bole_codegen.search.ledger import Ledger, now
from bole_codegen.search.results import Failed

#: Seconds for a worker to import torch and open the device.
START_LIMIT = 180.0
#: Seconds that a worker may wait for the device; others hold it for a short time each.
WAIT_LIMIT = 900.0
#: Phases in which no kernel of the candidate runs, to what it is when they take too long: nothing it can be blamed for.
LATE: Mapping[str, str] = {"wait": "busy", "draw": "busy"}


class WorkerStartError(RuntimeError):
    """Workers do not start at all: no candidate is to blame, so the search cannot go on."""


@dataclass(frozen=True)
class Job:
    """One call of a bench method.

    Attributes:
        method: name.
        args: picklable arguments.
        limit: seconds a phase may take; a worker that needs longer is killed.
        phase: that it begins in.
        limits: seconds of phases with a limit of their own.
        late: phase to the kind of failure when it takes too long; see :data:`LATE` for others, else ``hang``.
        adapt: gives ``limit`` when a worker begins, which may know more than was known when the job was queued.
        took: told how many seconds a call that returned took in its worker, without the wait for one.
    """

    method: str
    args: tuple[Any, ...]
    limit: float
    phase: str = "run"
    limits: Mapping[str, float] = field(default_factory=dict)
    late: Mapping[str, str] = field(default_factory=dict)
    adapt: Callable[[], float] | None = None
    took: Callable[[float], None] | None = None

    def limit_of(self, phase: str) -> float:
        """Return the seconds that a phase may take."""
        return self.limits.get(phase, WAIT_LIMIT if phase == "wait" else self.limit)


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection
    place: int
    ready: bool = False
    job: Job | None = None
    answer: asyncio.Future[Any] | None = None
    phase: str = "start"
    since: float = 0.0
    timer: asyncio.TimerHandle | None = None


class Pool:
    """Workers that each run one job at a time. A worker that dies, hangs or is poisoned is replaced.

    Args:
        factory: ``module:name`` of the bench class.
        options: its arguments, picklable; or one set of arguments a worker.
        count: workers.
        log: file that takes what workers print; their own output otherwise.
        ledger: told what workers are busy with.

    Use as a context manager, or call :meth:`close`.
    """

    def __init__(
        self,
        factory: str,
        options: dict[str, Any] | Sequence[dict[str, Any]],
        count: int = 1,
        log: str | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self._factory = factory
        self._options = [options] * max(1, count) if isinstance(options, dict) else list(options)
        self._log = log
        self._ledger = ledger or Ledger()
        self._workers: list[_Worker] = []
        self._queue: deque[tuple[Job, asyncio.Future[Any]]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failed_starts = 0
        self._broken: WorkerStartError | None = None
        self.restarts = 0

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self._options)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start every worker without waiting for it."""
        while len(self._workers) < self.size:
            self._workers.append(self._spawn(len(self._workers)))

    async def call(self, job: Job) -> Any:
        """Run one job and return its result, or a :class:`Failed`. When cancelled, it ends unheard if it has begun.

        Raises:
            WorkerStartError: workers die before they are ready.
        """
        self._attach()
        if self._broken is not None:
            raise self._broken
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.append((job, future))
        self._hand_out()
        return await future

    def run(self, jobs: Sequence[Job]) -> list[Any]:
        """Run jobs on all workers and return their results in order, from outside an event loop."""

        async def every() -> list[Any]:
            return await asyncio.gather(*(self.call(job) for job in jobs))

        try:
            return asyncio.run(every())
        finally:
            self._loop = None

    def close(self) -> None:
        """End every worker."""
        for worker in self._workers:
            self._forget(worker)
            worker.pipe.close()
        for worker in self._workers:
            idle = worker.ready and worker.job is None
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(1.0 if idle else 0.0)
            _kill(worker.process)
        self._workers = []

    def _attach(self) -> None:
        """Listen to every worker from the running loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._queue.clear()
            for worker in self._workers:
                self._listen(worker)
        self.start()

    def _listen(self, worker: _Worker) -> None:
        if self._loop is None:
            return
        self._loop.add_reader(worker.pipe.fileno(), self._receive, worker)
        if not worker.ready:
            worker.timer = self._loop.call_later(START_LIMIT, self._too_late, worker)

    def _forget(self, worker: _Worker) -> None:
        if worker.timer is not None:
            worker.timer.cancel()
            worker.timer = None
        if self._loop is not None and not self._loop.is_closed() and not worker.pipe.closed:
            self._loop.remove_reader(worker.pipe.fileno())

    def _spawn(self, place: int) -> _Worker:
        mine, theirs = socket.socketpair()
        with mine, theirs:
            command = [sys.executable, "-m", "bole_codegen.search.worker", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            pipe = Connection(mine.detach())
        worker = _Worker(process, pipe, place, since=now())
        with contextlib.suppress(OSError):
            pipe.send((self._factory, self._options[place], self._log, sys.path))
        self._listen(worker)
        return worker

    def _hand_out(self) -> None:
        for worker in self._workers:
            if not worker.ready or worker.job is not None:
                continue
            while self._queue and self._queue[0][1].done():
                self._queue.popleft()  # Cancelled while it waited.
            if not self._queue:
                return
            job, worker.answer = self._queue.popleft()
            worker.job = job if job.adapt is None else replace(job, limit=job.adapt())
            self._enter(worker, worker.job.phase)
            with contextlib.suppress(OSError):  # One that died while idle is seen when its pipe is read.
                worker.pipe.send((worker.job.method, worker.job.args))

    def _enter(self, worker: _Worker, phase: str) -> None:
        """A worker begins a phase, with the time limit of that phase."""
        assert worker.job is not None
        assert self._loop is not None
        if worker.timer is not None:
            worker.timer.cancel()
        worker.phase, worker.since = phase, now()
        self._ledger.enter(phase)
        worker.timer = self._loop.call_later(worker.job.limit_of(phase), self._too_late, worker)

    def _leave(self, worker: _Worker) -> None:
        if worker.timer is not None:
            worker.timer.cancel()
            worker.timer = None
        self._ledger.leave(worker.phase, now() - worker.since)

    def _finish(self, worker: _Worker, result: Any) -> None:
        self._leave(worker)
        answer, worker.job, worker.answer = worker.answer, None, None
        if answer is not None and not answer.done():
            answer.set_result(result)
        self._hand_out()

    def _too_late(self, worker: _Worker) -> None:
        worker.timer = None
        if worker.job is None:
            self._replace(worker, Failed("hang", f"did not start within {START_LIMIT:g} s"))
            return
        limit, late = worker.job.limit_of(worker.phase), {**LATE, **worker.job.late}
        kind = late.get(worker.phase, "hang")
        what = "" if worker.phase == "run" else f" ({worker.phase})"
        self._replace(worker, Failed(kind, f"no answer within {limit:.3g} s{what}"))

    def _receive(self, worker: _Worker) -> None:
        try:
            answer: Sequence[Any] = worker.pipe.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(5)
            self._replace(worker, _death(worker.process.returncode))
            return
        if answer[0] == "ready":
            if worker.timer is not None:
                worker.timer.cancel()
                worker.timer = None
            worker.ready = True
            self._failed_starts = 0
            self._ledger.enter("start")
            self._ledger.leave("start", now() - worker.since)
            self._hand_out()
        elif answer[0] == "broken":
            self._break(f"a worker could not start: {answer[1]}")
        elif answer[0] == "phase":
            self._leave(worker)
            self._enter(worker, str(answer[1]))
        elif answer[0] == "ok":
            if worker.job is not None and worker.job.took is not None:
                worker.job.took(float(answer[2]))
            self._finish(worker, answer[1])
        else:
            failed = Failed(str(answer[1]), str(answer[2]))
            if answer[3]:
                self._replace(worker, failed)
            else:
                self._finish(worker, failed)

    def _replace(self, worker: _Worker, failed: Failed) -> None:
        """Put a fresh worker in the place of one that is lost."""
        self._forget(worker)
        worker.pipe.close()
        _kill(worker.process)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= 3:
                self._break(f"three workers in a row died before they were ready; the last: {failed.message}")
                return
        self.restarts += 1
        self._workers[worker.place] = self._spawn(worker.place)
        if worker.job is not None:
            self._finish(worker, failed)

    def _break(self, why: str) -> None:
        """Fail everything that waits: no candidate is to blame."""
        self._broken = WorkerStartError(why)
        waiting = [w.answer for w in self._workers] + [future for _, future in self._queue]
        for worker in self._workers:
            self._forget(worker)
        for future in waiting:
            if future is not None and not future.done():
                future.set_exception(self._broken)


def _death(code: int | None) -> Failed:
    if code == -signal.SIGKILL:
        # Not by the candidate itself: the system takes a process when memory runs out.
        return Failed("killed", "the process was killed (signal 9); out of memory, or by someone")
    how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return Failed("crash", f"the process died ({how})")


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2)
