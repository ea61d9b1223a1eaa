"""What compiles candidates for a GPU that is not present, inside a worker process."""

from __future__ import annotations

import time

from bole_codegen.compile import CompileError, Resources, compile_offline
from bole_codegen.render import RenderedKernel, render
from bole_codegen.search.results import CandidateError, KernelResources, Screened
from bole_runtime import gpus
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config

#: Bytes a thread may keep in local memory; a few come from the ABI, more are spills that cost every program.
SPILL_LIMIT = 64


class CompileBench:
    """Compiles candidates for one GPU.

    Args:
        gpu: key of its record.
    """

    uses_device = False

    def __init__(self, gpu: str) -> None:
        self._limits = gpus.get(gpu).limits()
        self._done: dict[str, Resources | CompileError] = {}

    def screen(self, problem: Problem, config: Config) -> Screened:
        """Compile every kernel of a candidate.

        Raises:
            CandidateError: one does not compile, does not fit, or spills.
        """
        started = time.perf_counter()
        found = []
        for kernel in render(problem, config):
            done = self._compile(kernel, problem)
            if isinstance(done, CompileError):
                kind = "resources" if "shared memory" in str(done) else "compile"
                raise CandidateError(kind, f"{kernel.name}: {done}")
            if done.spill_bytes > SPILL_LIMIT:
                raise CandidateError("spills", f"{kernel.name} spills {done.spill_bytes} bytes a thread")
            found.append(KernelResources(done.shared_bytes, done.registers, done.spill_bytes))
        return Screened(None, tuple(found), time.perf_counter() - started)

    def _compile(self, kernel: RenderedKernel, problem: Problem) -> Resources | CompileError:
        """Compile a kernel once: candidates of several kernels share some of them."""
        if kernel.name not in self._done:
            try:
                self._done[kernel.name] = compile_offline(kernel, problem, self._limits)
            except CompileError as error:
                self._done[kernel.name] = error
        return self._done[kernel.name]
