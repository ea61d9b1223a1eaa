"""Error measure and output poisoning."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def relative_error(out: Tensor, ref: Tensor) -> float:
    """Return the relative error in Frobenius norm, computed in fp64.

    NaN or infinity in ``out`` where ``ref`` is finite gives ``inf``, so a comparison with a bound always fails. A zero
    reference gives 0 for a zero output and ``inf`` otherwise.

    Raises:
        ValueError: the shapes differ.
    """
    if out.shape != ref.shape:
        raise ValueError(f"shapes differ: {tuple(out.shape)} and {tuple(ref.shape)}")
    if out.numel() == 0:
        return 0.0
    rows = out.shape[0] if out.ndim else 1
    error = norm = torch.zeros((), dtype=torch.float64, device=ref.device)
    # Row by row: a large output needs no fp64 copy of itself.
    for o, r in zip(out.detach().reshape(rows, -1), ref.detach().reshape(rows, -1), strict=True):
        want = r.double()
        error = error + (o.to(ref.device).double() - want).square().sum()
        norm = norm + want.square().sum()
    e, n = float(error.sqrt()), float(norm.sqrt())
    if not math.isfinite(e) or not math.isfinite(n):
        return math.inf
    if n == 0.0:
        return 0.0 if e == 0.0 else math.inf
    return e / n


def poison_(tensor: Tensor) -> Tensor:
    """Fill in place with NaN (floats) or the lowest value (integers), so that an unwritten element shows."""
    if tensor.is_floating_point():
        return tensor.fill_(math.nan)
    return tensor.fill_(torch.iinfo(tensor.dtype).min)
