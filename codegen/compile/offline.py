"""Compile a kernel for a GPU that need not be present, and read what it takes of a multiprocessor."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bole_codegen.render import RenderedKernel
from bole_runtime.kernels.arguments import Argument, usual_gate_dtypes
from bole_runtime.kernels.loader import import_kernel
from bole_runtime.kernels.problem import Problem

if TYPE_CHECKING:
    from bole_runtime.kernels.problem import Specialisation
    from bole_runtime.kernels.space import GpuLimits

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


class CompileError(RuntimeError):
    """A kernel does not compile for a GPU. The message is one short reason."""


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes.

    Attributes:
        registers: a thread.
        spill_bytes: local memory a thread, spills and stack.
        shared_bytes: shared memory a program, dynamic included.
        threads: a program.
        seconds: compile time here.
        cubin: the machine code.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int
    seconds: float
    cubin: bytes

    def programs_per_sm(
        self, registers_per_sm: int = 65536, shared_per_sm: int = 228 * 1024, threads: int = 2048
    ) -> int:
        """Return how many programs fit a multiprocessor at a time."""
        by_registers = registers_per_sm // max(1, -(-self.registers // 8) * 8 * self.threads)
        by_shared = shared_per_sm // (self.shared_bytes + 1024)
        return max(0, min(by_registers, by_shared, threads // self.threads, 32))


def _element(argument: Argument, problem: Specialisation) -> str:
    if argument.kind == "in":
        return problem.in_dtype
    if argument.kind == "state":
        return problem.state_dtype
    if argument.kind == "gate" and isinstance(problem, Problem):
        names = ("a_ptr", "b_ptr", "a_log_ptr", "dt_bias_ptr") if problem.gate_mode == "raw" else ("g_ptr", "beta_ptr")
        return (problem.gate_dtypes or usual_gate_dtypes(problem))[names.index(argument.name)]
    return {"f32": "fp32", "scratch": "fp32", "i32": "i32", "index": "i32", "table": "i64"}[argument.kind]


def signature(
    problem: Specialisation, arguments: tuple[Argument, ...], used: frozenset[str]
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
    """Return types, constants and divisibility of the arguments of a usual call (dense, nothing captured).

    This is the specialisation that a launch asks for, so that compiling ahead fills the cache a launch reads.
    """
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, argument in enumerate(arguments):
        if argument.unit:
            types[argument.name] = "constexpr"
            constants[argument.name] = 1
            continue
        if argument.kind in ("int", "stride"):
            types[argument.name] = "i32"
        elif argument.kind == "float":
            types[argument.name] = "fp32"
        elif argument.optional and argument.name not in used:
            types[argument.name] = "constexpr"
            constants[argument.name] = None
            continue
        else:
            types[argument.name] = "*" + _element(argument, problem)
        if argument.specialised:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return types, constants, attributes


@functools.lru_cache(maxsize=1)
def _cuobjdump() -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def _usage(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [_cuobjdump(), "--dump-resource-usage", file.name], capture_output=True, text=True, check=False, timeout=60
        )
    found = _USAGE.search(done.stdout)
    if found is None:
        raise CompileError(f"cuobjdump reports no resource usage: {(done.stderr or done.stdout).strip()[:200]}")
    return int(found[1]), int(found[2])


def compile_offline(rendered: RenderedKernel, problem: Specialisation, gpu: GpuLimits) -> Resources:
    """Compile a rendered kernel for an NVIDIA GPU's compute capability.

    Args:
        rendered: the kernel.
        problem: what it was rendered for; decides the argument types.
        gpu: limits of the target.

    Returns:
        What the kernel takes.

    Raises:
        CompileError: it does not compile or takes more shared memory than the target has.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    started = time.perf_counter()
    function = import_kernel(rendered.name, rendered.source)
    types, constants, attributes = signature(problem, rendered.plan.arguments, frozenset(rendered.plan.scratch))
    major, minor = gpu.compute_capability
    try:
        compiled = triton.compile(
            ASTSource(function, types, constexprs=constants, attrs=attributes),
            target=GPUTarget("cuda", major * 10 + minor, 32),
            options=rendered.plan.options,
        )
    except Exception as error:
        raise CompileError(f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:300]}") from error
    shared = int(compiled.metadata.shared)
    if shared > gpu.smem_per_block:
        raise CompileError(f"takes {shared} bytes of shared memory, a block has {gpu.smem_per_block}")
    registers, local = _usage(compiled.asm["cubin"])
    return Resources(
        registers, local, shared, 32 * rendered.plan.num_warps, time.perf_counter() - started, compiled.asm["cubin"]
    )
