"""What a dispatcher asks unless it is told otherwise: the folders of tables, variants, GPUs, Triton's version."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config, GpuLimits, Variant


def own_root() -> Path | None:
    """Return the folder that ``BOLE_TUNED_DIR`` names, None when it is not set."""
    own = os.environ.get("BOLE_TUNED_DIR")
    return Path(own) if own else None


def own_root_fault() -> str | None:
    """Return why ``BOLE_TUNED_DIR`` changes nothing, None when it is not set or has tables or lists."""
    own = own_root()
    if own is None or any(found for pattern in ("*/*.json", "*/known-bad/*.json") for found in own.glob(pattern)):
        return None
    why = "holds no <gpu>/<family>.json" if own.is_dir() else "is no folder"
    return f"BOLE_TUNED_DIR={own} {why}; only the tables of the package are used"


def tuned_roots() -> tuple[Path, ...]:
    """Return the folders that hold ``<gpu>/<family>.json``: ``BOLE_TUNED_DIR`` when set, then the package's."""
    own = own_root()
    roots = [] if own is None else [own]
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


def kernel_names(problem: Specialisation, config: Config, names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the names of the kernels that a choice would load, None where none can be made.

    Args:
        problem: of the call; what a table key does not say of it is taken as usual.
        config: the choice.
        names: of the kernels that its entry names.
    """
    from bole_runtime.kernels.loader import names_of
    from bole_runtime.kernels.problem import Problem

    if isinstance(problem, Problem):
        problem = problem.replace(qk_l2norm=None, gate_dtypes=())
    try:
        return names_of(problem, config, names)
    except Exception:  # Of the templates, or no templates: what is wrong with it is said when it is loaded.
        return None


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
