"""Comba, one token at a time: the prediction comes from the state before decay, with the feedback key p."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.reference.gates import cast, outer, read, sigmoid, softplus


def ready_gates(
    gates: Mapping[str, torch.Tensor], mode: str, options: Mapping[str, float], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return p [.., HK, dk], g and beta [.., HV] in ``dtype``."""
    x = cast(gates, dtype)
    if mode == "ready":
        return x
    return {
        "p": x["p"],
        "g": -x["A_log"].exp() * softplus(x["a"] + x["dt_bias"]),
        "beta": options["beta_scale"] * sigmoid(x["b"]),
    }


def step(
    state: torch.Tensor, q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, gates: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advance every value head by one token; gates: p [HV, dk], g and beta [HV]."""
    predicted = torch.einsum("hvk,hk->hv", state, gates["p"])
    state = gates["g"].exp()[:, None, None] * state
    state = state + outer(gates["beta"][:, None] * (v - predicted), k)
    return state, read(state, q)
