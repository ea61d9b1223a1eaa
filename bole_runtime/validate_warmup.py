"""Arguments of ``warmup``: refused on every backend, before anything is drawn or compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bole_runtime.families.spec import DATA_DTYPES, GATE_DTYPES
from bole_runtime.precision import OUTPUT_BOUND
from bole_runtime.tree.check import INDEX_DTYPES, check_capacity
from bole_runtime.tree.tree import MAX_NODES
from bole_runtime.validate import not_a

#: More than any head dim or head count has; a wrong argument is likelier.
_MANY = 1 << 20


def check_sizes(
    key_heads: int,
    value_heads: int,
    dk: int,
    dv: int,
    max_batch: int,
    max_nodes: int,
    max_depth: int | None,
    layers: int,
) -> None:
    """Check the sizes of a geometry.

    Raises:
        TypeError: one is no int.
        ValueError: one is out of range, or HV is no multiple of HK.
    """
    sizes = {"key_heads": key_heads, "value_heads": value_heads, "dk": dk, "dv": dv, "max_batch": max_batch}
    for name, value in {**sizes, "layers": layers}.items():
        check_capacity(name, value, 1, _MANY)
    check_capacity("max_nodes", max_nodes, 1, MAX_NODES)
    if max_depth is not None:
        check_capacity("max_depth", max_depth, 0, max_nodes - 1)
    if value_heads % key_heads:
        raise ValueError(f"value_heads: {value_heads} is no multiple of key_heads, {key_heads}")


def check_types(
    dtype: object, state_dtype: object, gate_dtype: object, index_dtype: object, precision: str | Sequence[str],
    backend: str,
) -> None:  # fmt: skip
    """Check element types and profiles.

    Args:
        dtype: of q, k and v.
        state_dtype: of the pools.
        gate_dtype: of raw gates, or None.
        index_dtype: of slots and accepted nodes.
        precision: one profile or several.
        backend: that serves the geometry.

    Raises:
        TypeError: an element type that tensors of a call cannot have, or profiles that are no names.
        ValueError: a profile that does not exist, or none.
    """
    data: tuple[tuple[str, object, tuple[torch.dtype, ...]], ...] = (
        ("dtype", dtype, DATA_DTYPES),
        ("state_dtype", state_dtype, DATA_DTYPES),
        ("gate_dtype", dtype if gate_dtype is None else gate_dtype, GATE_DTYPES),
        ("index_dtype", index_dtype, INDEX_DTYPES),
    )
    for name, value, allowed in data:
        if not isinstance(value, torch.dtype) or value not in allowed:
            raise TypeError(f"{name}: {value!r} is not allowed; allowed: {', '.join(map(str, allowed))}")
        if value is torch.float64 and backend == "triton" and allowed is DATA_DTYPES:
            raise TypeError(f"{name}: torch.float64 is served by the torch and reference backends only")
    profiles = (precision,) if isinstance(precision, str) else precision
    if not isinstance(profiles, Sequence):
        not_a("precision", precision, "a profile, or a list or tuple of them")
    known = ", ".join(sorted(OUTPUT_BOUND))
    if not profiles:
        raise ValueError(f"precision: expected at least one profile, got none; known: {known}")
    for profile in profiles:
        if not isinstance(profile, str) or profile not in OUTPUT_BOUND:
            raise ValueError(f"precision: {profile!r} is unknown; known: {known}")


def check_switches(packed: object, captured: object, progress: object) -> None:
    """Check what is on or off, and the callback.

    Raises:
        TypeError: a wrong type.
    """
    for name, value in (("packed", packed), ("captured", captured)):
        if not isinstance(value, bool):
            not_a(name, value, "a bool")
    if progress is not None and not callable(progress):
        not_a("progress", progress, "a function of one line, or None")


def check_device(device: torch.device | str | None) -> torch.device:
    """Return the device to prepare; without one, the current CUDA device, or the CPU.

    Raises:
        TypeError: no device.
        ValueError: no such device here.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, (str, torch.device)):
        not_a("device", device, "a torch.device, its name, or None")
    try:
        where = torch.device(device)
    except RuntimeError:
        where = None
    if where is None or where.type not in ("cpu", "cuda"):
        raise ValueError(f"device: {str(device)!r} is not allowed; allowed: cpu, cuda, cuda:0 and so on")
    if where.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (where.index or 0) >= count:
            here = f"devices 0 to {count - 1}" if count else "none that torch can use"
            raise ValueError(f"device: {str(where)!r} is no CUDA device of this machine, which has {here}")
    return where
