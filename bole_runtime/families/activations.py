"""Functions of gate logits, in the dtype they are given."""

from __future__ import annotations

import torch


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 + e^x), stable without a threshold: max(x, 0) + log1p(e^-|x|)."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return log(sigmoid(x))."""
    return -softplus(-x)
