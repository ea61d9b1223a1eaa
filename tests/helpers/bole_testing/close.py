"""Comparison with an oracle."""

from __future__ import annotations

import torch


def relative_norm(got: torch.Tensor, ref: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference over that of ``ref``; the absolute norm where ``ref`` is zero."""
    got, ref = got.detach().double().cpu(), ref.detach().double().cpu()
    scale = ref.norm().item()
    return (got - ref).norm().item() / (scale if scale > 0 else 1.0)


def assert_close(name: str, got: torch.Tensor, ref: torch.Tensor, bound: float) -> float:
    """Fail unless ``got`` is finite, of the shape of ``ref``, and within ``bound`` of it in relative Frobenius norm.

    Returns:
        The error.
    """
    assert got.shape == ref.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(ref.shape)}"
    assert bool(torch.isfinite(ref).all()), f"{name}: the reference is not finite"
    bad = int((~torch.isfinite(got)).sum())
    assert bad == 0, f"{name}: {bad} of {got.numel()} values are NaN or infinite"
    error = relative_norm(got, ref)
    assert error <= bound, f"{name}: relative error {error:.3g}, bound {bound:.3g}"
    return error


def assert_same_bits(name: str, got: torch.Tensor, ref: torch.Tensor) -> None:
    """Fail unless both tensors hold the same bytes, NaN payloads and signs of zero included."""
    assert got.shape == ref.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(ref.shape)}"
    assert got.dtype == ref.dtype, f"{name}: dtype {got.dtype}, expected {ref.dtype}"
    same = torch.equal(
        got.detach().cpu().reshape(-1).view(torch.uint8), ref.detach().cpu().reshape(-1).view(torch.uint8)
    )
    assert same or got.numel() == 0, f"{name}: bytes differ"
