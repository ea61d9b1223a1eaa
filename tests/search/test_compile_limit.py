"""How long a kernel may compile: far longer than those before it took, once enough of them are known."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import search_fakes as fakes
import table_fakes

from bole_codegen.search import compiler as module
from bole_codegen.search.compiler import COMPILE_LIMIT, ENOUGH, LEAST, PATIENCE, Compiler
from bole_codegen.search.results import Failed, KernelResources

(TARGET,) = fakes.targets((1,))
CONFIGS = list(table_fakes.FUSED.enumerate(TARGET.problem, table_fakes.LIMITS))
#: Seconds that a kernel takes here.
MOMENT = 0.05


class TimedBench:
    """Compiles in a moment, but for a tile of 256, which never ends."""

    uses_device = False

    def __init__(self, gpu: str) -> None:
        del gpu

    def compile(self, problem: Any, config: Any, index: int, wide: bool) -> KernelResources:
        if config["BV"] == 256:
            time.sleep(600.0)
        time.sleep(MOMENT)
        return KernelResources(0, 32, 0)


def _compiler(**options: Any) -> Compiler:
    return Compiler("h200", fakes.render, 1, factory="test_compile_limit:TimedBench", **options)


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [
        ([], COMPILE_LIMIT),
        ([1.0] * (ENOUGH - 1), COMPILE_LIMIT),  # Too few to say anything.
        ([1.0] * ENOUGH, LEAST),  # A share of the machine may be gone for a while.
        ([5.0] * ENOUGH, PATIENCE * 5.0),
        ([5.0] * ENOUGH + [100.0] * (ENOUGH - 1), PATIENCE * 5.0),  # Of the usual kernel, not of the slowest.
        ([5.0] * ENOUGH + [10.0] * (ENOUGH + 1), PATIENCE * 10.0),
        ([60.0] * ENOUGH, COMPILE_LIMIT),  # Never more than while nothing was known.
    ],
)
def test_the_limit_follows_the_kernels_before(seconds: list[float], limit: float) -> None:
    compiler = _compiler()
    compiler._seconds = seconds
    assert compiler.limit() == pytest.approx(limit)


def _compile(compiler: Compiler, configs: list[Any]) -> list[Any]:
    async def every() -> list[Any]:
        return [await compiler.candidate(TARGET.problem, c) for c in configs]

    try:
        return asyncio.run(every())
    finally:
        compiler.pool.close()


def test_a_kernel_that_takes_many_times_longer_is_slow_and_does_not_move_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ENOUGH", 3)
    monkeypatch.setattr(module, "LEAST", 1.0)
    one_each = {(c["BV"], c["STAGES"]): c for c in CONFIGS}
    quick = [c for (bv, _), c in one_each.items() if bv != 256][:3]
    (late,) = (c for (bv, _), c in one_each.items() if bv == 256)
    compiler = _compiler()
    *good, slow, again = _compile(compiler, [*quick, late, late])
    assert all(isinstance(g, tuple) for g in good)
    assert isinstance(slow, Failed)
    assert slow.kind == "slow"
    limit = float(slow.message.removeprefix("no answer within ").split()[0])
    assert 1.0 <= limit < 20.0
    assert len(compiler._seconds) == 3
    assert again == slow  # Once for all candidates that share the kernel.


def _all_at_once(compiler: Compiler, configs: list[Any]) -> list[Any]:
    async def every() -> list[Any]:
        return await asyncio.gather(*(compiler.candidate(TARGET.problem, c) for c in configs))

    try:
        return asyncio.run(every())
    finally:
        compiler.pool.close()


def test_seconds_are_of_the_kernel_alone_however_long_it_waited() -> None:
    """One worker, which has to start first, and a queue: both are no part of what a kernel takes."""
    quick = [c for c in CONFIGS if c["BV"] != 256 and c["MODE"] == "rhs"][:10]
    compiler = _compiler()
    begun = time.monotonic()
    assert all(isinstance(g, tuple) for g in _all_at_once(compiler, quick))
    wall = time.monotonic() - begun
    seconds = compiler._seconds
    assert len(seconds) == len(quick)
    assert min(seconds) >= MOMENT
    # One after the other in that one worker: what each took adds up to no more than there was.
    assert sum(seconds) <= wall
    assert compiler.limit() == LEAST


def test_a_kernel_that_was_queued_before_anything_was_known_has_the_limit_of_when_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ENOUGH", 3)
    monkeypatch.setattr(module, "LEAST", 1.0)
    quick = [c for c in CONFIGS if c["BV"] != 256 and c["MODE"] == "rhs"][:3]
    late = next(c for c in CONFIGS if c["BV"] == 256)
    *good, slow = _all_at_once(_compiler(), [*quick, late])
    assert all(isinstance(g, tuple) for g in good)
    assert isinstance(slow, Failed)
    assert slow.kind == "slow"
    limit = float(slow.message.removeprefix("no answer within ").split()[0])
    assert 1.0 <= limit < 20.0
