"""Retention, one token at a time: a fixed decay a head, nothing is erased."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.reference.gates import cast, outer, read


def ready_gates(
    gates: Mapping[str, torch.Tensor], mode: str, options: Mapping[str, float], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return g in ``dtype``."""
    return cast(gates, dtype)


def step(
    state: torch.Tensor, q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, gates: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advance every value head by one token; gates: g [HV], the same for every token."""
    state = gates["g"].exp()[:, None, None] * state + outer(v, k)
    return state, read(state, q)
