"""A GPU bench some of whose candidates break the device."""

from __future__ import annotations

import os
import signal
from typing import Any

import plant_kernels
import torch

from bole_codegen.search import operands as operands_module
from bole_codegen.search.case import bits
from bole_codegen.search.gpu_bench import GpuBench, classify
from bole_codegen.search.results import CandidateError
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config

#: Ways to fail while running, to the kind that each is.
RUNNING = {
    "illegal": "illegal",
    "hang": "hang",
    "crash": "crash",
    "killed": "killed",
    "raise": "error",
    "shared launch": "resources",
    "refused launch": "compile",
    "wrong": "wrong",
    "bounds": "bounds",
}


def _launch(how: str) -> None:
    """Launch a kernel that takes more shared memory than there is, or that does not compile."""
    values = torch.zeros(256, 4096, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros(128, 128, device="cuda")
    if how == "shared launch":
        plant_kernels.planted_shared[(1,)](values, out, num_warps=8, num_stages=8)
    else:
        plant_kernels.planted_refused[(1,)](out)
    torch.cuda.synchronize()


class PlantedBench(GpuBench):
    """Checks as told by ``plant``: an illegal access, a kernel that never ends and the like; honestly otherwise."""

    def __init__(self, plant: dict[str, str], **options: Any) -> None:
        super().__init__(**options)
        self._plant = plant

    def gate(self, problem: Problem, config: Config) -> float:
        how = self._plant.get(str(config))
        if how == "illegal":
            try:
                values = torch.zeros(8, device="cuda")
                values[torch.full((1,), 1 << 40, device="cuda")] += 1
                torch.cuda.synchronize()
            except Exception as error:
                raise classify(error) from error
        elif how == "hang":
            torch.cuda._sleep(1 << 50)
            torch.cuda.synchronize()
        elif how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raise":
            raise ValueError("planted")
        elif how in ("shared launch", "refused launch"):
            try:
                _launch(how)
            except Exception as error:
                raise classify(error) from error
        elif how is not None:
            raise CandidateError(how, "planted", fatal=how == "bounds")
        return super().gate(problem, config)


class CorruptedBench(GpuBench):
    """Runs the kernel, then corrupts what it wrote as told by ``plant``, so that the check itself has to see it."""

    def __init__(self, plant: dict[str, str], **options: Any) -> None:
        super().__init__(**options)
        self._plant = plant

    def gate(self, problem: Problem, config: Config) -> float:
        how = self._plant.get(str(config))
        real, launches = operands_module.verify, 0

        def verify(*args: Any, **options: Any) -> Any:
            nonlocal launches
            result, out = real(*args, **options), options["out"]
            if how is None or out is None:  # the reference, which a worker computes at its first check, has none
                return result
            launches += 1
            if how == "wrong":
                out[..., -1] *= 1.5
            elif how == "nan":
                out[2, 3, 1, -1] = float("nan")
            elif how == "bounds":
                torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel() + 5).fill_(1.0)
            elif how == "canary":
                options["state"][6, 0, 0, 0] = 1.0
            elif how == "races":
                # The last bit, so that no result is wrong, but no two in a row are the same.
                bits(out)[0, 0, 0, 0] ^= launches % 2
            else:
                raise ValueError(f"nothing is known of {how!r}")
            return result

        operands_module.verify = verify
        try:
            error = super().gate(problem, config)
        finally:
            operands_module.verify = real
        assert how is None or launches, f"{how} was never planted"
        return error
