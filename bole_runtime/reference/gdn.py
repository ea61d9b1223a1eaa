"""Gated DeltaNet, one token at a time, written as its definition reads."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.reference.gates import cast, outer, read, sigmoid, softplus


def ready_gates(
    gates: Mapping[str, torch.Tensor], mode: str, options: Mapping[str, float], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return g and beta in ``dtype``, computed in that dtype from raw gates when ``mode`` is ``raw``."""
    x = cast(gates, dtype)
    if mode == "ready":
        return x
    return {
        "g": -x["A_log"].exp() * softplus(x["a"] + x["dt_bias"]),
        "beta": options["beta_scale"] * sigmoid(x["b"]),
    }


def step(
    state: torch.Tensor, q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, gates: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advance every value head by one token.

    Args:
        state: [HV, dv, dk].
        q: [HV, dk], scaled, or None when no output is wanted.
        k: [HV, dk].
        v: [HV, dv].
        gates: g and beta, [HV].

    Returns:
        The new state and the output [HV, dv].
    """
    state = gates["g"].exp()[:, None, None] * state
    u = gates["beta"][:, None] * (v - (state @ k[:, :, None])[:, :, 0])
    state = state + outer(u, k)
    return state, read(state, q)
