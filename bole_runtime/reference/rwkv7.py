"""RWKV-7 / DPLR, one token at a time: a rank-two update, read from the state before decay."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.reference.gates import cast, outer, read, sigmoid


def ready_gates(
    gates: Mapping[str, torch.Tensor], mode: str, options: Mapping[str, float], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return g, a and b [.., HV, dk] in ``dtype``."""
    x = cast(gates, dtype)
    if mode == "ready":
        return x
    unit = torch.nn.functional.normalize(x["kk"], dim=-1)
    return {
        "g": -torch.exp(torch.tensor(-0.5, dtype=dtype)) * sigmoid(x["w"]),
        "a": -unit,
        "b": unit * sigmoid(x["iclr"]),
    }


def step(
    state: torch.Tensor, q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, gates: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advance every value head by one token; gates: g, a and b [HV, dk]."""
    moved = torch.einsum("hvk,hk->hv", state, gates["a"])
    state = state * gates["g"].exp()[:, None, :] + outer(moved, gates["b"]) + outer(v, k)
    return state, read(state, q)
