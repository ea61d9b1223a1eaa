"""Arguments of ``warmup``: refused on every backend, before anything is drawn or compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bole_runtime.families.spec import DATA_DTYPES
from bole_runtime.precision import OUTPUT_BOUND
from bole_runtime.tree.check import check_capacity
from bole_runtime.tree.tree import MAX_NODES

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


def check_types(dtype: object, state_dtype: object, precision: str | Sequence[str]) -> None:
    """Check element types and profiles.

    Raises:
        TypeError: an element type that tensors of a call cannot have.
        ValueError: a profile that does not exist.
    """
    for name, value in (("dtype", dtype), ("state_dtype", state_dtype)):
        if not isinstance(value, torch.dtype) or value not in DATA_DTYPES:
            raise TypeError(f"{name}: {value!r} is not allowed; allowed: {', '.join(map(str, DATA_DTYPES))}")
    for profile in (precision,) if isinstance(precision, str) else precision:
        if profile not in OUTPUT_BOUND:
            raise ValueError(f"precision: {profile!r} is unknown; known: {', '.join(sorted(OUTPUT_BOUND))}")
