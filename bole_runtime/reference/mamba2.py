"""Mamba2 (SSD), one token at a time: q is C, k is B, v is x."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.reference.gates import cast, outer, softplus


def ready_gates(
    gates: Mapping[str, torch.Tensor], mode: str, options: Mapping[str, float], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return g and dt [.., HV], and D [HV] if there is one, in ``dtype``."""
    x = cast(gates, dtype)
    if mode == "ready":
        return x
    dt = softplus(x["dt_raw"] + x["dt_bias"] if "dt_bias" in x else x["dt_raw"])
    dt = dt.clamp(options["dt_min"], options["dt_max"])
    ready = {"g": dt * -x["A_log"].exp(), "dt": dt}
    return {**ready, "D": x["D"]} if "D" in x else ready


def step(
    state: torch.Tensor, q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, gates: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advance every head by one token; gates: g and dt [HV], and D [HV] for the skip term."""
    state = state * gates["g"].exp()[:, None, None] + outer(gates["dt"][:, None] * v, k)
    if q is None:
        return state, None
    out = torch.einsum("hvk,hk->hv", state, q)
    return state, out + gates["D"][:, None] * v if "D" in gates else out
