"""SGLang's convolution along trees, which walks each tree node by node and keeps a window a node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from peers.sglang_loader import execute, find_file

CONV_FILE = "sglang/kernels/ops/mamba/causal_conv1d_triton.py"
ENTRY = "causal_conv1d_update"


def load_conv(path: str | None, cache: Path) -> Callable[..., torch.Tensor]:
    """Return SGLang's ``causal_conv1d_update`` from a wheel, an unpacked wheel or site-packages.

    Args:
        path: the path, or None.
        cache: where a wheel's file is written, since Triton reads a kernel's source from a file.

    Raises:
        PeerUnavailable: no path, or another version's layout.
    """
    return execute(find_file(path, CONV_FILE, cache), ENTRY, "convolution")


def links(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return first child and next sibling of every node, int32 [B, N], -1 for none: SGLang's form of a tree.

    Args:
        parents: int [B, N], node 0 the only root.
    """
    rows = parents.tolist()
    child = [[-1] * len(row) for row in rows]
    sibling = [[-1] * len(row) for row in rows]
    for b, row in enumerate(rows):
        last: dict[int, int] = {}
        for i, p in enumerate(row[1:], 1):
            if p in last:
                sibling[b][last[p]] = i
            else:
                child[b][p] = i
            last[p] = i
    return tuple(torch.tensor(t, dtype=torch.int32, device=parents.device) for t in (child, sibling))  # type: ignore[return-value]


class ConvPeer:
    """One layer's call. The state pool is its own: the kernel shifts the nodes into it."""

    def __init__(
        self,
        entry: Callable[..., torch.Tensor],
        x: torch.Tensor,
        weight: torch.Tensor,
        state: torch.Tensor,
        slots: torch.Tensor,
        parents: torch.Tensor,
    ) -> None:
        """Prepare a call.

        Args:
            entry: from :func:`load_conv`.
            x: [B, N, C].
            weight: [C, W].
            state: pool [slots, C, W - 1]; copied.
            slots: int32 [B].
            parents: int [B, N], node 0 the only root.
        """
        batch, nodes, channels = x.shape
        # Channels contiguous, as its own checks want.
        self.state = state.transpose(1, 2).contiguous().transpose(1, 2)
        child, sibling = links(parents)
        self.arguments: dict[str, Any] = {
            "x": x.transpose(1, 2),
            "conv_state": self.state,
            "weight": weight,
            "activation": "silu",
            "conv_state_indices": slots,
            "intermediate_conv_window": x.new_zeros(batch, nodes, channels, weight.shape[1] - 1),
            "intermediate_state_indices": torch.arange(batch, dtype=torch.int32, device=x.device),
            "retrieve_next_token": child,
            "retrieve_next_sibling": sibling,
            "retrieve_parent_token": torch.zeros_like(child),
        }
        self.entry = entry

    def __call__(self) -> torch.Tensor:
        """Enqueue the call; returns its output, [B, N, C]."""
        return self.entry(**self.arguments).transpose(1, 2)
