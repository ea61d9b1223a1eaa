"""DeltaNet, one token at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.reference.gates import cast, outer, read, sigmoid


def ready_gates(
    gates: Mapping[str, torch.Tensor], mode: str, options: Mapping[str, float], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return beta in ``dtype``."""
    x = cast(gates, dtype)
    return x if mode == "ready" else {"beta": options["beta_scale"] * sigmoid(x["b"])}


def step(
    state: torch.Tensor, q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, gates: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advance every value head by one token; gates: beta [HV]."""
    predicted = torch.einsum("hvk,hk->hv", state, k)
    state = state + outer(gates["beta"][:, None] * (v - predicted), k)
    return state, read(state, q)
