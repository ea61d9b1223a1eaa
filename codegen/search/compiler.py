"""Compiling in many processes, every kernel once, whatever candidates and classes share it."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bole_codegen.search.kinds import kind_of
from bole_codegen.search.ledger import Ledger
from bole_codegen.search.pool import Job, Pool
from bole_codegen.search.results import Failed, KernelResources
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config

#: Seconds for a kernel to compile while nothing is known of the others.
COMPILE_LIMIT = 150.0
#: Limits that adapt: a kernel may take so many times the median of those before, at least LEAST and a share of it.
PATIENCE = 8.0
LEAST = 20.0
#: Kernels compiled before the limit adapts.
ENOUGH = 8

Render = Callable[[Specialisation, Config], Sequence[Any]]
Compiled = KernelResources | Failed
#: Name of a kernel, whether its output is widened, and arguments that are compiled into it.
_Key = tuple[str, bool, tuple[tuple[str, int], ...]]


class Compiler:
    """Compiles the kernels of candidates.

    Args:
        gpu: key of the GPU.
        render: problem and configuration to kernels, with ``name``.
        workers: processes.
        log: file for what compilers print.
        ledger: told where the time goes.
        factory: bench class, for tests.
    """

    def __init__(
        self,
        gpu: str,
        render: Render,
        workers: int,
        log: str | None = None,
        ledger: Ledger | None = None,
        factory: str = "bole_codegen.search.compile_bench:CompileBench",
    ) -> None:
        self._render = render
        self.pool = Pool(factory, {"gpu": gpu}, workers, log, ledger)
        self._done: dict[_Key, asyncio.Task[Compiled]] = {}
        self._wanted: dict[_Key, int] = {}
        self._seconds: list[float] = []

    @property
    def kernels(self) -> int:
        """Kernels compiled or being compiled."""
        return len(self._done)

    def limit(self) -> float:
        """Return the seconds that a kernel may take: far more than those before it took in their workers."""
        if len(self._seconds) < ENOUGH:
            return COMPILE_LIMIT
        return min(COMPILE_LIMIT, max(LEAST, PATIENCE * statistics.median(self._seconds)))

    async def candidate(
        self, problem: Specialisation, config: Config, wide: bool = False
    ) -> tuple[KernelResources, ...] | Failed:
        """Compile every kernel of a candidate, in parallel.

        Returns:
            What each takes, in launch order, or the first failure.
        """
        try:
            kernels = self._render(problem, config)
        except Exception as error:
            return Failed("error", f"does not render: {type(error).__name__}: {error}")
        # What of its arguments Triton compiles into a kernel may differ between buckets.
        fixed = tuple(sorted(kind_of(problem).scalars(problem, config, wide).items()))
        keys: list[_Key] = [(k.name, wide, fixed) for k in kernels]
        for i, key in enumerate(keys):
            if key not in self._done:
                self._done[key] = asyncio.ensure_future(self._compile(problem, config, i, wide))
            self._wanted[key] = self._wanted.get(key, 0) + 1
        try:
            # Shielded: another candidate may wait for the same kernel.
            done = await asyncio.gather(*(asyncio.shield(self._done[key]) for key in keys))
        finally:
            for key in keys:
                self._wanted[key] -= 1
                if not self._wanted[key] and not self._done[key].done():
                    self._done.pop(key).cancel()
        failed = [d for d in done if isinstance(d, Failed)]
        return failed[0] if failed else tuple(d for d in done if isinstance(d, KernelResources))

    async def _compile(self, problem: Specialisation, config: Config, index: int, wide: bool) -> Compiled:
        # Of the kernel alone, as its worker saw it: the wait for a worker that is free, or has not started yet, says
        # nothing of kernels, and many that are queued at once would make the limit many times too loose.
        job = Job(
            "compile", (problem, config, index, wide), COMPILE_LIMIT, "compile", late={"compile": "slow"},
            adapt=self.limit, took=self._seconds.append,
        )  # fmt: skip
        result: Compiled = Failed("killed", "not tried")
        for _ in range(2):  # A process that was killed says little about the candidate: once more.
            result = await self.pool.call(job)
            if not (isinstance(result, Failed) and result.kind == "killed"):
                break
        return result


def spilled(resources: Sequence[KernelResources], limit: int) -> Failed | None:
    """Return why a candidate does not count if it spills more bytes than its variant may."""
    most = max((r.spill_bytes for r in resources), default=0)
    return Failed("spills", f"spills {most} bytes a thread") if most > limit else None
