"""A GPU bench some of whose candidates break the device."""

from __future__ import annotations

from typing import Any

import torch

from bole_codegen.search.gpu_bench import GpuBench, classify
from bole_codegen.search.results import CandidateError, Screened
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config


class PlantedBench(GpuBench):
    """Screens as told by ``plant``, an illegal access or a kernel that never ends; honestly otherwise."""

    def __init__(self, plant: dict[str, str], **options: Any) -> None:
        super().__init__(**options)
        self._plant = plant

    def screen(self, problem: Problem, config: Config) -> Screened:
        how = self._plant.get(str(config))
        if how == "illegal":
            try:
                values = torch.zeros(8, device="cuda")
                values[torch.full((1,), 1 << 40, device="cuda")] += 1
                torch.cuda.synchronize()
            except Exception as error:
                raise classify(error) from error
        if how == "hang":
            torch.cuda._sleep(1 << 50)
            torch.cuda.synchronize()
        if how == "wrong":
            raise CandidateError("wrong", "planted")
        return super().screen(problem, config)
