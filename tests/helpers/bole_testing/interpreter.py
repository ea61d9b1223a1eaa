"""Runs the tests marked ``interpreter`` in a child pytest whose environment has TRITON_INTERPRET=1.

Triton reads the variable when its own library functions are defined, so it must be set before the first import of
Triton, and a process that has it can no longer compile. One pytest run holds both kinds of tests, so the marked ones
run elsewhere: the parent sends the child one node id at a time and takes over the reports it sends back. Each test is
counted, timed and selected (-k, -m, -x, -n) as any other. A child that dies or hangs fails the test it was running.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any

import pytest

MARKER = "interpreter"
VARIABLE = "TRITON_INTERPRET"
#: Seconds the child may take beyond a test's own timeout: its start, its imports, its collection.
GRACE = 120.0


class InterpreterChild:
    """The plugin of the child process: runs what the parent asks for, reports to the parent."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._commands = os.fdopen(read_fd, encoding="utf-8")
        self._answers = os.fdopen(write_fd, "w", encoding="utf-8")
        self._config: pytest.Config | None = None

    def _send(self, **message: Any) -> None:
        self._answers.write(json.dumps(message, default=str) + "\n")
        self._answers.flush()

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        for line in self._commands:
            item = items.get(json.loads(line))
            if item is not None:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            self._send(done=item is not None)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        assert self._config is not None
        self._send(report=self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


class ChildLost(Exception):
    """The child ended or went silent."""


class _Process:
    """A running child and its two pipes."""

    def __init__(self, config: pytest.Config, files: list[str]) -> None:
        down_read, down_write = os.pipe()
        up_read, up_write = os.pipe()
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_CORE_"))}
        env[VARIABLE] = "1"
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(config.rootpath)]
        if config.inipath is not None:
            command += ["-c", str(config.inipath)]
        self._process = subprocess.Popen(
            [*command, f"--interpreter-child={down_read},{up_write}", *files],
            cwd=config.rootpath,
            env=env,
            pass_fds=(down_read, up_write),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        os.close(down_read)
        os.close(up_write)
        self._commands = os.fdopen(down_write, "w", encoding="utf-8")
        self._up_read = up_read
        self._buffer = b""

    def run(self, nodeid: str, timeout: float) -> Iterator[dict[str, Any]]:
        """Ask for one test; yield its serialised reports."""
        try:
            self._commands.write(json.dumps(nodeid) + "\n")
            self._commands.flush()
        except BrokenPipeError:
            raise ChildLost(f"it had ended before this test\n{self._tail()}") from None
        deadline = time.monotonic() + timeout
        while True:
            message = self._receive(deadline)
            if "report" in message:
                yield message["report"]
            elif message["done"]:
                return
            else:
                raise ChildLost(f"it did not collect this test\n{self._tail()}")

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._up_read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ChildLost(f"it sent nothing in time\n{self._tail()}")
            chunk = os.read(self._up_read, 1 << 16)
            if not chunk:
                raise ChildLost(f"it ended with status {self._process.wait()}\n{self._tail()}")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]

    def close(self, kill: bool = False) -> None:
        if kill:
            self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._commands.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._up_read)
        self._log.close()


class InterpreterRelay:
    """The plugin of the parent process. It does nothing when the parent itself runs under the variable."""

    def __init__(self, config: pytest.Config) -> None:
        self._active = os.environ.get(VARIABLE) != "1"
        try:
            self._default_timeout = float(config.getini("timeout") or 300.0)
        except (KeyError, ValueError):  # pytest-timeout is not installed
            self._default_timeout = 300.0
        self._files: list[str] = []
        self._child: _Process | None = None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        marked = [item for item in session.items if item.get_closest_marker(MARKER)]
        self._files = sorted({str(item.path) for item in marked})

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not self._active or not item.get_closest_marker(MARKER) or item.get_closest_marker("skip"):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        try:
            for data in self._process(item.config).run(item.nodeid, self._timeout(item) + GRACE):
                report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
                if report.outcome == "skipped" and isinstance(report.longrepr, list):
                    report.longrepr = tuple(report.longrepr)  # JSON has no tuples, and pytest insists on one here
                item.ihook.pytest_runtest_logreport(report=report)
        except ChildLost as lost:
            if self._child is not None:
                self._child.close(kill=True)
                self._child = None
            item.ihook.pytest_runtest_logreport(report=_failure(item, f"the interpreter child was lost: {lost}"))
        # Tests of this process may have set up the item's module; no one else tears it down before the next one. (Not
        # the teardown hook: plugins expect a setup before it.)
        state = item.session._setupstate
        call = pytest.CallInfo.from_call(lambda: state.teardown_exact(nextitem), when="teardown")
        if call.excinfo is not None:
            item.ihook.pytest_runtest_logreport(report=pytest.TestReport.from_item_and_call(item, call))
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        # The child has its own timer for the test; one here would fire inside the relay, outside of any test phase.
        return True if self._active and item.get_closest_marker(MARKER) else None

    def pytest_sessionfinish(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _process(self, config: pytest.Config) -> _Process:
        if self._child is None:
            self._child = _Process(config, self._files)
        return self._child

    def _timeout(self, item: pytest.Item) -> float:
        marker = item.get_closest_marker("timeout")
        return float(marker.args[0]) if marker and marker.args else self._default_timeout


def _failure(item: pytest.Item, text: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=text,
        when="call",
        sections=[],
        duration=0.0,
    )
