"""What a dispatcher asks unless it is told otherwise: the folders of tables, variants, GPUs, Triton's version."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config, GpuLimits, Variant


def tuned_roots() -> tuple[Path, ...]:
    """Return the folders that hold ``<gpu>/<family>.json``: ``BOLE_TUNED_DIR`` when set, then the package's."""
    roots = []
    own = os.environ.get("BOLE_TUNED_DIR")
    if own:
        roots.append(Path(own))
    spec = importlib.util.find_spec("bole_tuned")
    if spec is not None and spec.submodule_search_locations:
        roots.append(Path(next(iter(spec.submodule_search_locations))))
    return tuple(roots)


def declared_variants(op: str) -> Iterable[Variant]:
    """Return the declared variants of an operation."""
    from bole_runtime.kernels.variants import all_variants

    return all_variants(op)


def analytic_default(problem: Specialisation, limits: GpuLimits) -> Config:
    """Return the default that needs no table."""
    from bole_runtime.kernels import default_config

    return default_config(problem, limits)


def gpu_keys(device_name: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the key of a GPU and those of its stand-ins, None for an unknown one."""
    from bole_runtime import gpus

    record = gpus.identify(device_name)
    return None if record is None else (record.key, record.tables_from)


def explain_gpu(device_name: str) -> str:
    """Return what to tell people about a GPU that is not known."""
    from bole_runtime import gpus

    return gpus.explain_device_name(device_name)


def installed_triton() -> str:
    """Return the version of Triton that is installed, empty without one."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""
