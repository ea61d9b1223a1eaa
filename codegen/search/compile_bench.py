"""What compiles kernels, for a GPU that need not be present, inside a worker process."""

from __future__ import annotations

from dataclasses import replace

from bole_codegen.compile import CompileError, compile_offline
from bole_codegen.render import RenderedKernel, render
from bole_codegen.search.kinds import kind_of
from bole_codegen.search.results import CandidateError, KernelResources
from bole_runtime import gpus
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config


class CompileBench:
    """Compiles kernels for one GPU, into Triton's cache, where a launch finds them.

    Args:
        gpu: key of its record.
    """

    uses_device = False

    def __init__(self, gpu: str) -> None:
        self._limits = gpus.get(gpu).limits()

    def compile(self, problem: Specialisation, config: Config, index: int, wide: bool) -> KernelResources:
        """Compile one kernel of a candidate.

        Args:
            problem: what it is rendered for.
            config: the candidate.
            index: place among its kernels, in launch order.
            wide: as checks call it, for an fp32 output, rather than as timings do, which capture factors.

        Raises:
            CandidateError: it does not compile or does not fit.
        """
        kernel = render(problem, config)[index]
        kind = kind_of(problem)
        scalars = kind.scalars(problem, config, wide)
        try:
            if wide:
                done = compile_offline(widened(kernel), problem, self._limits, scalars=scalars)
            else:
                done = compile_offline(kernel, problem, self._limits, kind.captured(problem), scalars)
        except CompileError as error:
            failure = "resources" if "shared memory" in str(error) else "compile"
            raise CandidateError(failure, f"{kernel.name}: {error}") from error
        return KernelResources(done.shared_bytes, done.registers, done.spill_bytes)


def widened(kernel: RenderedKernel) -> RenderedKernel:
    """Return a kernel whose output is fp32."""
    arguments = tuple(
        replace(a, kind="f32") if a.name == "out_ptr" and a.kind == "in" else a for a in kernel.plan.arguments
    )
    return replace(kernel, plan=replace(kernel.plan, arguments=arguments))
