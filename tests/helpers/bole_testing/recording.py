"""Which kernels calls on a GPU would compile, found on a machine that need not have one, and their compilation ahead.

Calls run on CPU tensors: the Triton backend goes as far as asking Triton for a kernel, the torch backend then computes
the result. What Triton was asked for (kernel and argument specialisation) is noted, and can be compiled for the GPU in
any process; the launch on the GPU then finds it in Triton's cache.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from bole_codegen.compile.machine_code import faults
from bole_codegen.compile.offline import machine_code, targeting
from bole_runtime import Config, gpus
from bole_runtime.backends import Backend, torch_backend
from bole_runtime.calls import CommitCall, VerifyCall
from bole_runtime.conv.calls import ConvCall, ConvCommitCall
from bole_runtime.kernels.loader import LoadedKernel, load
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.tables.lookup import dispatcher


@dataclass(frozen=True)
class Job:
    """One compilation: kernel ``index`` of a configuration, for one specialisation of its arguments."""

    name: str
    problem: Specialisation
    config: Config
    index: int
    specialisation: str


@dataclass
class Recording:
    """What was asked for.

    Attributes:
        jobs: compilations, each once: bucket sizes that do not shape a kernel do not count.
        calls: verifications and commits that were made.
    """

    jobs: dict[tuple[str, str], Job] = field(default_factory=dict)
    calls: int = 0


@contextlib.contextmanager
def recording(gpu: str) -> Iterator[Recording]:
    """Note what calls on CPU tensors would compile on a GPU of this key, which need not be there."""
    from triton import knobs

    from bole_runtime.backends import triton_backend
    from bole_runtime.conv import torch_backend as torch_conv
    from bole_runtime.conv import triton_backend as triton_conv

    record = gpus.get(gpu)
    limits, name = record.limits(), record.device_names[0]
    made = Recording()
    known: dict[str, tuple[Specialisation, Config, int]] = {}

    def choose(
        problem: Specialisation, device: torch.device, variant: Config | None
    ) -> tuple[Config, tuple[LoadedKernel, ...]]:
        config = variant or dispatcher().resolve(problem, name, limits).config
        kernels = load(problem, config)
        for i, kernel in enumerate(kernels):
            known[kernel.name] = (problem, config, i)
        return config, kernels

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        short = fn.name.rsplit(".", 1)[-1]
        made.jobs.setdefault(
            (short, compile["specialization_data"]), Job(short, *known[short], compile["specialization_data"])
        )
        return True  # Triton then neither compiles nor launches

    def verify(call: VerifyCall) -> None:
        made.calls += 1
        triton_backend.verify(call)
        torch_backend.verify(call)

    def commit(call: CommitCall) -> None:
        made.calls += 1
        triton_backend.commit(call)
        torch_backend.commit(call)

    def tree_conv(call: ConvCall) -> None:
        if call.x.dtype is not torch.float64:  # that is a reference
            made.calls += 1
            triton_conv.tree_conv(call)
        torch_conv.tree_conv(call)

    def conv_commit(call: ConvCommitCall) -> None:
        made.calls += 1
        triton_conv.conv_commit(call)
        torch_conv.conv_commit(call)

    conv = SimpleNamespace(tree_conv=tree_conv, conv_commit=conv_commit)
    backend = Backend("triton", verify, commit)
    # The package's functions have the names of their modules.
    modules = [sys.modules[f"bole_runtime.backends.triton_backend.{m}"] for m in ("verify", "commit")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(targeting(limits.compute_capability))
        for module in (*modules, triton_conv):
            stack.enter_context(mock.patch.object(module, "choose", choose))
        stack.enter_context(mock.patch("bole_runtime.api.get_backend", return_value=backend))
        stack.enter_context(mock.patch("bole_runtime.conv.api._backend", return_value=conv))
        for module in ("commits", "operations"):
            stack.enter_context(mock.patch(f"bole_runtime.state.{module}.get_backend", return_value=backend))
        stack.enter_context(mock.patch.object(knobs.runtime, "jit_cache_hook", hook))
        yield made


def compile_job(job: Job, gpu: str) -> float:
    """Compile for a GPU of this key; return the seconds it took.

    Raises:
        RuntimeError: the kernel takes more shared memory than a block of the GPU has, or is miscompiled as
            :mod:`bole_codegen.compile.machine_code` can tell.
    """
    started = time.perf_counter()
    limits = gpus.get(gpu).limits()
    with targeting(limits.compute_capability):
        kernel = load(job.problem, job.config)[job.index].function.preload(job.specialisation)
    shared, limit = kernel.metadata.shared, limits.smem_per_block
    if shared > limit:
        raise RuntimeError(f"takes {shared} bytes of shared memory, a block has {limit}")
    wrong = faults(machine_code(kernel.asm["cubin"]))
    if wrong:
        raise RuntimeError(f"miscompiled by ptxas: {wrong[0]}")
    return time.perf_counter() - started
