"""Programs of an interpreted launch that wait for each other, run side by side.

The interpreter runs programs one after the other, which never ends where one waits for a later one. Here each has a
thread, one of them runs, and another that is chosen at random goes on after every atomic operation.
"""

from __future__ import annotations

import inspect
import random
import threading
from typing import Any

import pytest

#: More often than this the baton changes hands only where programs wait for each other for good.
_LIMIT = 20_000


class Baton:
    """Who runs. ``programs`` are those that have not ended."""

    def __init__(self, seed: int) -> None:
        self.changed = threading.Condition()
        self.random = random.Random(seed)
        self.programs: set[int] = set()
        self.runs = 0
        self.passed = 0

    def wait(self, program: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.runs == program)

    def leave_to(self, others: set[int]) -> None:
        with self.changed:
            if others:
                self.runs = self.random.choice(sorted(others))
            self.passed += 1
            self.changed.notify_all()


def run_side_by_side(monkeypatch: pytest.MonkeyPatch, seed: int) -> Baton:
    """Make interpreted launches run SPLIT programs at a time, a constant of the kernel, side by side."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    baton = Baton(seed)
    mine = threading.local()
    atomic = type(builder).create_atomic_rmw

    def passing(self: Any, *arguments: Any) -> Any:
        result = atomic(self, *arguments)
        if baton.passed > _LIMIT:
            raise RuntimeError("the programs of a request wait for each other for good")
        baton.leave_to(baton.programs - {mine.program})
        baton.wait(mine.program)
        builder.set_grid_idx(mine.program, 0, 0)
        return result

    def launch(self: Any, *given: Any, **options: Any) -> None:
        names = inspect.getfullargspec(self.fn).args
        options = {k: v for k, v in options.items() if k in names}
        on_host, options_on_host = self._init_args_hst(given, options)
        scope = interpreter._patch_lang(self.fn)
        bound = inspect.getcallargs(self.fn, *on_host, **options_on_host)
        bound = {n: a if n in self.constexprs else interpreter._implicit_cvt(a) for n, a in bound.items()}
        builder.set_grid_dim(self.grid[0], 1, 1)
        errors: list[BaseException] = []

        def run(program: int) -> None:
            mine.program = program
            baton.wait(program)
            builder.set_grid_idx(program, 0, 0)
            try:
                self.fn(**bound)
            except BaseException as error:
                errors.append(error)
            baton.programs.discard(program)
            baton.leave_to(baton.programs)

        try:
            for first in range(0, self.grid[0], options["SPLIT"]):
                baton.programs = set(range(first, first + options["SPLIT"]))
                baton.runs = first
                threads = [threading.Thread(target=run, args=(p,), daemon=True) for p in sorted(baton.programs)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        finally:
            scope.restore()
        if errors:
            raise errors[0]
        self._restore_args_dev(given, on_host, options, options_on_host)

    monkeypatch.setattr(type(builder), "create_atomic_rmw", passing)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    return baton
