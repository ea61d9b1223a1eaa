"""From a call to a problem and from a problem to kernels. Reads host-side facts only."""

from __future__ import annotations

import functools
from typing import Any

import torch

from bole_runtime.gpus import device_limits
from bole_runtime.kernels.loader import LoadedKernel, load
from bole_runtime.kernels.problem import (
    DEPTH_BUCKETS,
    Specialisation,
    bucket,
    row_buckets,
    work_bucket,
)
from bole_runtime.kernels.space import Config, GpuLimits
from bole_runtime.kernels.variants import get_variant

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

_RAW_BITS = "Triton's interpreter multiplies the bfloat16 operands of a dot as raw bits, so the result would be wrong"

#: Products that the interpreter gets wrong or refuses, and those of the same profile that it can do.
_SAFE_MIX: dict[Any, str] = {"bf16": "tf32", "bf16x3": "tf32x3", "bf16x5": "tf32x3"}
_SAFE_SOLVE: dict[Any, str] = {"bf16x3": "tf32x3", "bf16x6": "tf32x3"}

#: What kernels are checked against where there is no GPU (the interpreter).
_INTERPRETER = GpuLimits((9, 0), 132, 232448, 60 << 20, 4800.0)


def short_dtype(tensor: torch.Tensor, argument: str) -> str:
    """Return the short name of a tensor's dtype.

    Raises:
        TypeError: the Triton backend has no kernels for it.
    """
    name = SHORT.get(tensor.dtype)
    if name is None:
        raise TypeError(
            f"{argument}: {tensor.dtype} has no Triton kernels (bfloat16, float16, float32 do); "
            "BOLE_BACKEND=torch serves float64"
        )
    return name


@functools.lru_cache(maxsize=64)
def limits_of(device_index: int) -> tuple[str, GpuLimits]:
    """Return the name and the limits of a CUDA device; index -1 is the interpreter."""
    if device_index < 0:
        return "Triton interpreter", _INTERPRETER
    return torch.cuda.get_device_name(device_index), device_limits(torch.cuda.get_device_properties(device_index))


@functools.lru_cache(maxsize=4096)
def buckets(op: str, nodes: int, depth: int, pending: int, batch: int, heads: int) -> tuple[int, int, int, int]:
    """Return the node, depth, pending and work buckets of a call's capacities."""
    nodes_bucket, pending_bucket = row_buckets(op, nodes, pending)
    return (
        nodes_bucket,
        bucket(min(depth, nodes), DEPTH_BUCKETS, "depth"),
        pending_bucket,
        work_bucket(batch, heads),
    )


def choose(
    problem: Specialisation, device: torch.device, variant: Config | None
) -> tuple[Config, tuple[LoadedKernel, ...]]:
    """Return the configuration for a problem and its kernels.

    Raises:
        TypeError: bfloat16 inputs on a CPU, under Triton's interpreter.
        ValueError: a pinned ``variant`` cannot serve the problem on this device.
    """
    index = -1 if device.type == "cpu" else (device.index if device.index is not None else torch.cuda.current_device())
    if index < 0 and problem.in_dtype == "bf16":
        raise TypeError(
            f"bfloat16 inputs on a CPU: {_RAW_BITS}; float16 and float32 work, BOLE_BACKEND=torch serves all"
        )
    if variant is not None:
        return _pinned(problem, index, variant)
    return _tuned(problem, index)


@functools.lru_cache(maxsize=4096)
def _pinned(problem: Specialisation, index: int, variant: Config) -> tuple[Config, tuple[LoadedKernel, ...]]:
    declared = get_variant(problem.op, variant.variant)
    config = declared.config(variant.as_dict())
    reason = declared.reason(problem, config, limits_of(index)[1])
    if reason is None and index < 0 and config != _interpretable(problem, config):
        reason = f"{_RAW_BITS}, and it has no programmatic launch"
    if reason is not None:
        raise ValueError(f"variant: {config} cannot serve {problem.key()}: {reason}")
    return config, load(problem, config)


@functools.lru_cache(maxsize=4096)
def _tuned(problem: Specialisation, index: int) -> tuple[Config, tuple[LoadedKernel, ...]]:
    from bole_runtime.kernels.default import default_config

    name, limits = limits_of(index)
    if index < 0:
        config = _interpretable(problem, default_config(problem, limits))
        return config, load(problem, config)
    from bole_runtime.tables.lookup import dispatcher

    resolution = dispatcher().resolve(problem, name, limits)
    names = () if resolution.entry is None else tuple(k.name for k in resolution.entry.entry.kernels)
    kernels = load(problem, resolution.config, names)
    dispatcher().note_stale(problem, resolution, [k.name for k in kernels])
    return resolution.config, kernels


def _interpretable(problem: Specialisation, config: Config) -> Config:
    """Return a configuration of the same profile without what Triton's interpreter gets wrong or does not have."""
    values = config.as_dict()
    if values.get("mix") in _SAFE_MIX:
        values["mix"] = _SAFE_MIX[values["mix"]]
    if values.get("solve") in _SAFE_SOLVE:
        values["solve"] = _SAFE_SOLVE[values["solve"]]
    for name, plain in (("mix_store", "fp32"), ("pdl", False), ("chain", False)):
        if name in values:
            values[name] = plain
    return get_variant(problem.op, config.variant).config(values)


def clear() -> None:
    """Forget every choice, after tables changed."""
    _pinned.cache_clear()
    _tuned.cache_clear()
