"""Compile a kernel for a GPU that need not be present, and read what it takes of a multiprocessor."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from bole_codegen.compile.machine_code import faults
from bole_codegen.render import RenderedKernel
from bole_runtime.kernels.arguments import Argument, gate_tensors, usual_gate_dtypes
from bole_runtime.kernels.loader import import_kernel
from bole_runtime.kernels.problem import Problem

if TYPE_CHECKING:
    from bole_runtime.kernels.problem import Specialisation
    from bole_runtime.kernels.space import GpuLimits

_TORCH: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "i32": torch.int32,
    "i64": torch.int64,
}
#: Arguments that are as in the usual call.
NONE: Mapping[str, int] = MappingProxyType({})
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
        dtypes = problem.gate_dtypes or usual_gate_dtypes(problem)
        return dtypes[gate_tensors(problem).index(argument.name)]
    return {"f32": "fp32", "scratch": "fp32", "i32": "i32", "index": "i32", "table": "i64"}[argument.kind]


def usual_values(
    problem: Specialisation,
    rendered: RenderedKernel,
    present: frozenset[str] = frozenset(),
    scalars: Mapping[str, int] = NONE,
) -> list[Any]:
    """Return what stands for the arguments of a usual call (dense, nothing captured), in order: dtypes for tensors.

    Args:
        problem: decides the element types.
        rendered: the kernel.
        present: optional tensors that the call has besides the scratch buffers.
        scalars: values of arguments that are not as in the usual call, by name.
    """
    given = present | frozenset(rendered.plan.scratch)
    values: list[Any] = []
    for argument in rendered.plan.arguments:
        if argument.kind in ("int", "stride"):
            values.append(scalars.get(argument.name, 1 if argument.unit else 16))
        elif argument.kind == "float":
            values.append(1.0)
        elif argument.optional and argument.name not in given:
            values.append(None)
        else:
            values.append(_TORCH[_element(argument, problem)])
    return values


class TargetDriver:
    """Stands for a GPU that need not be there: enough to ask Triton for a kernel and to compile it, not to launch it.

    Args:
        capability: of the GPU.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        """Return what is compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * self._capability[0] + self._capability[1], 32)

    def get_current_device(self) -> int:
        """Return an index that no GPU has: functions keep a target and kernels by it."""
        return -1

    def get_current_stream(self, device: int) -> int:
        """Return a stream nothing is enqueued on."""
        return 0


@contextlib.contextmanager
def targeting(capability: tuple[int, int]) -> Iterator[None]:
    """Make Triton compile for a compute capability, whatever GPU is there."""
    from triton.runtime import driver

    # Not through its properties: reading the active driver would look for a GPU.
    before = dict(vars(driver))
    driver.set_active(TargetDriver(capability))
    try:
        yield
    finally:
        vars(driver).update(before)


def request(
    rendered: RenderedKernel,
    problem: Specialisation,
    gpu: GpuLimits,
    present: frozenset[str] = frozenset(),
    scalars: Mapping[str, int] = NONE,
) -> Any:
    """Ask Triton for a kernel as a launch does, and return it compiled.

    The arguments are specialised by Triton's own code for launches, not by a copy of its rules: what is compiled here
    is in the cache under the key that the launch looks for.

    Args:
        rendered: the kernel.
        problem: what it was rendered for; decides the argument types.
        gpu: limits of the target.
        present: see :func:`usual_values`.
        scalars: see :func:`usual_values`.
    """
    function = import_kernel(rendered.name, rendered.source)
    with targeting(gpu.compute_capability):
        return function.warmup(*usual_values(problem, rendered, present, scalars), grid=(1,), **rendered.plan.options)


@functools.lru_cache(maxsize=1)
def _cuobjdump() -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def _dump(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [_cuobjdump(), f"--dump-{what}", file.name], capture_output=True, text=True, check=False, timeout=60
        )
    if not done.stdout:
        raise CompileError(f"cuobjdump reports no {what}: {done.stderr.strip()[:200]}")
    return done.stdout


def machine_code(cubin: bytes) -> str:
    """Return the machine code of a kernel as text.

    Raises:
        CompileError: it cannot be read.
    """
    return _dump(cubin, "sass")


def _usage(cubin: bytes) -> tuple[int, int]:
    usage = _dump(cubin, "resource-usage")
    found = _USAGE.search(usage)
    if found is None:
        raise CompileError(f"cuobjdump reports no resource usage: {usage.strip()[:200]}")
    return int(found[1]), int(found[2])


def compile_offline(
    rendered: RenderedKernel,
    problem: Specialisation,
    gpu: GpuLimits,
    present: frozenset[str] = frozenset(),
    scalars: Mapping[str, int] = NONE,
) -> Resources:
    """Compile a rendered kernel for an NVIDIA GPU's compute capability.

    Args:
        rendered: the kernel.
        problem: what it was rendered for; decides the argument types.
        gpu: limits of the target.
        present: see :func:`usual_values`.
        scalars: see :func:`usual_values`.

    Returns:
        What the kernel takes.

    Raises:
        CompileError: it does not compile, takes more shared memory than the target has, or is miscompiled as
            :mod:`bole_codegen.compile.machine_code` can tell.
    """
    started = time.perf_counter()
    try:
        compiled = request(rendered, problem, gpu, present, scalars)
    except Exception as error:
        raise CompileError(f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:300]}") from error
    shared = int(compiled.metadata.shared)
    if shared > gpu.smem_per_block:
        raise CompileError(f"takes {shared} bytes of shared memory, a block has {gpu.smem_per_block}")
    registers, local = _usage(compiled.asm["cubin"])
    wrong = faults(machine_code(compiled.asm["cubin"]))
    if wrong:
        raise CompileError(f"miscompiled by ptxas: {wrong[0]}")
    return Resources(
        registers, local, shared, 32 * rendered.plan.num_warps, time.perf_counter() - started, compiled.asm["cubin"]
    )
