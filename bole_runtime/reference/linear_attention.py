"""Linear attention, one token at a time: nothing decays, nothing is erased."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.reference.gates import outer, read


def ready_gates(
    gates: Mapping[str, torch.Tensor], mode: str, options: Mapping[str, float], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return nothing: there are no gates."""
    return {}


def step(
    state: torch.Tensor, q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, gates: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advance every value head by one token."""
    state = state + outer(v, k)
    return state, read(state, q)
