"""Generated kernels: what they are specialised for, their variants and tile parameters, how they are loaded."""

from __future__ import annotations

from bole_runtime.kernels.default import default_config
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, GpuLimits, KernelPlan, Param, Variant

__all__ = ["Config", "GpuLimits", "KernelPlan", "Param", "Problem", "Variant", "default_config"]
