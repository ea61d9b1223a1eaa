"""Gated DeltaNet 2, one token at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.reference.gates import cast, outer, read, sigmoid, softplus


def ready_gates(
    gates: Mapping[str, torch.Tensor], mode: str, options: Mapping[str, float], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return g and erase [.., HV, dk] and write [.., HV, dv] in ``dtype``."""
    x = cast(gates, dtype)
    if mode == "ready":
        return x
    f = x["f"] + x["dt_bias"] if "dt_bias" in x else x["f"]
    return {
        "g": -x["A_log"].exp()[:, None] * softplus(f),
        "erase": options["erase_scale"] * sigmoid(x["b"]),
        "write": sigmoid(x["w"]),
    }


def step(
    state: torch.Tensor, q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, gates: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advance every value head by one token; gates: g and erase [HV, dk], write [HV, dv]."""
    state = state * gates["g"].exp()[:, None, :]
    erased = torch.einsum("hvk,hk->hv", state, gates["erase"] * k)
    state = state + outer(gates["write"] * v - erased, k)
    return state, read(state, q)
