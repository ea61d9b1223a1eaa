"""Counter-based random numbers: Philox 4x32 with 10 rounds (Salmon et al. 2011), in torch.

A number is a function of a request's seed, of the position of the token that it decides, and of the decision; it knows
nothing of the batch. The device kernels draw the same numbers.
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def _mulhilo(constant: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and the low word of a 32 x 32 bit product, in int64 without overflow of the high one."""
    low, high = constant * (x & 0xFFFF), constant * (x >> 16)
    return (high + (low >> 16)) >> 16, (constant * x) & _MASK


def philox(seed: torch.Tensor, *counters: torch.Tensor | int) -> tuple[torch.Tensor, ...]:
    """Return four 32-bit words.

    Args:
        seed: int64, the 64-bit key.
        *counters: up to four 32-bit counter words, int64 tensors that broadcast with ``seed``; missing ones are 0.

    Returns:
        Four int64 tensors with values of 32 bits.
    """
    # Filled on the device: a copy of a host number would not fit into a captured graph.
    words = [
        c.long() & _MASK
        if isinstance(c, torch.Tensor)
        else torch.full((), c & _MASK, dtype=torch.int64, device=seed.device)
        for c in (*counters, *[0] * (4 - len(counters)))
    ]
    c0, c1, c2, c3 = torch.broadcast_tensors(*words)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        high0, low0 = _mulhilo(_MULTIPLIERS[0], c0)
        high1, low1 = _mulhilo(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: torch.Tensor, position: torch.Tensor, decision: torch.Tensor | int) -> torch.Tensor:
    """Return fp32 numbers in [0, 1), multiples of 2^-24.

    Args:
        seed: int64 [...].
        position: int64 [...], position in its request of the token that is decided.
        decision: 0 for the token that is emitted, 1 + rank for the acceptance of the rank-th child.
    """
    word = philox(seed, position, decision)[0]
    return (word >> 8).float() * 2.0**-24
