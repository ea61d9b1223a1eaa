"""A compiling process some of whose candidates do not compile, do not fit, or never end. Needs no GPU."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from bole_codegen.render import RenderedKernel
from bole_codegen.search import compile_bench
from bole_codegen.search.compile_bench import CompileBench
from bole_codegen.search.results import KernelResources
from bole_runtime.kernels.arguments import Argument
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config

#: Ways to fail while compiling, to the kind that each is.
COMPILING = {
    "refused": "compile",
    "assembly": "compile",
    "shared": "resources",
    "spilling": "spills",
    "endless": "slow",
    "killed compiler": "killed",
}
_KERNELS = Path(__file__).with_name("plant_kernels.py")
_OUT = (Argument("out_ptr", "f32"),)


def spoil(kernel: RenderedKernel, how: str) -> RenderedKernel:
    """Return a kernel that fails as told in the place of an honest one."""
    if how == "spilling":
        # The kernel itself, with far too few threads and registers: what does not fit goes to memory.
        return replace(kernel, plan=replace(kernel.plan, num_warps=1, registers=32))
    arguments = (Argument("values_ptr", "in"), *_OUT) if how == "shared" else _OUT
    plan = replace(kernel.plan, arguments=arguments, num_warps=8, num_stages=8, scratch=(), pdl=False, registers=0)
    return RenderedKernel(f"planted_{how}", _KERNELS.read_text(), kernel.text_hash, plan)


class PlantedCompiler(CompileBench):
    """Compiles, really, what ``plant`` tells of a configuration; honestly what it tells nothing of."""

    def __init__(self, gpu: str, plant: dict[str, str] | None = None) -> None:
        super().__init__(gpu)
        self._plant = {c: how for c, how in (plant or {}).items() if how in COMPILING}

    def compile(self, problem: Specialisation, config: Config, index: int, wide: bool) -> KernelResources:
        how = self._plant.get(str(config))
        if how is None:
            return super().compile(problem, config, index, wide)
        if how == "killed compiler":
            os.kill(os.getpid(), signal.SIGKILL)
        honest: Any = compile_bench.render
        compile_bench.render = lambda p, c: tuple(spoil(k, how) for k in honest(p, c))
        try:
            return super().compile(problem, config, index, wide)
        finally:
            compile_bench.render = honest
