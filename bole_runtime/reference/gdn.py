"""Gated DeltaNet, one token at a time, written as its definition reads."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def ready_gates(
    gates: Mapping[str, torch.Tensor], mode: str, beta_scale: float, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return g and beta in ``dtype``, computed in that dtype from raw gates when ``mode`` is ``raw``."""
    gates = {name: t.to(dtype) for name, t in gates.items()}
    if mode == "ready":
        return {"g": gates["g"], "beta": gates["beta"]}
    x = gates["a"] + gates["dt_bias"]
    softplus = torch.logaddexp(x, torch.zeros_like(x))
    return {"g": -gates["A_log"].exp() * softplus, "beta": beta_scale / (1 + torch.exp(-gates["b"]))}


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
    state = state + u[:, :, None] * k[:, None, :]
    return state, None if q is None else (state @ q[:, :, None])[:, :, 0]
