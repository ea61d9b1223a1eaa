"""Kernels of a stage table are timed alone: without programmatic launches, for as long as the table takes."""

from __future__ import annotations

from typing import Any

from verify_bench.stages import one_by_one

from bole_runtime.kernels import GpuLimits, Problem, default_config
from bole_runtime.kernels.loader import LoadedKernel
from bole_runtime.kernels.variants import get_variant

PROBLEM = Problem("verify", "gdn", 128, 128, 2, "bf16", "fp32", "raw", "fast", 16, 8, 0, 2048)
H200 = GpuLimits((9, 0), 132, 232448, 60 << 20, 4800.0)


class Recorder:
    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.options.append(options)


def test_no_kernel_starts_before_the_one_in_front_has_ended() -> None:
    config = default_config(PROBLEM, H200)
    plan = get_variant("verify", config.variant).plans(PROBLEM, config)[1]
    recorder = Recorder()
    kernel = LoadedKernel("readout", recorder, plan)
    with one_by_one():
        kernel.launch((1,), ())
    kernel.launch((1,), ())
    alone, usual = recorder.options
    assert usual == {**alone, "launch_pdl": True}
