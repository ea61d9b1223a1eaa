"""Kimi Delta Attention, one token at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.reference.gates import cast, outer, read, sigmoid, softplus


def ready_gates(
    gates: Mapping[str, torch.Tensor], mode: str, options: Mapping[str, float], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return g [.., HV, dk] and beta [.., HV] in ``dtype``."""
    x = cast(gates, dtype)
    if mode == "ready":
        return x
    f = x["f"] + x["dt_bias"] if "dt_bias" in x else x["f"]
    rate = x["A_log"].exp()[:, None]
    bound = options["lower_bound"]
    g = -rate * softplus(f) if bound == 0 else bound * sigmoid(rate * f)
    return {"g": g, "beta": options["beta_scale"] * sigmoid(x["b"])}


def step(
    state: torch.Tensor, q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, gates: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advance every value head by one token; gates: g [HV, dk] and beta [HV]."""
    state = state * gates["g"].exp()[:, None, :]
    predicted = torch.einsum("hvk,hk->hv", state, k)
    state = state + outer(gates["beta"][:, None] * (v - predicted), k)
    return state, read(state, q)
