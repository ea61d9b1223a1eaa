"""Gate functions of the references, in the dtype they are given; written apart from those of the families."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def cast(gates: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return every tensor in ``dtype``."""
    return {name: t.to(dtype) for name, t in gates.items()}


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Return log(e^x + e^0)."""
    return torch.logaddexp(x, torch.zeros_like(x))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return 1 / (1 + e^-x)."""
    return 1 / (1 + torch.exp(-x))


def read(state: torch.Tensor, q: torch.Tensor | None) -> torch.Tensor | None:
    """Return S q for every head, [HV, dv]; None without a query."""
    return None if q is None else (state @ q[:, :, None])[:, :, 0]


def outer(value: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return value key^T for every head, [HV, dv, dk]."""
    return value[:, :, None] * key[:, None, :]
