"""Normalised calls: what ``tree_conv`` and ``conv_commit`` hand to a backend after validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from bole_runtime.conv.factors import ConvFactors, ConvPending
    from bole_runtime.kernels.space import Config
    from bole_runtime.tree import TreeBatch


@dataclass(slots=True, eq=False)
class ConvCall:
    """One convolution.

    Attributes:
        x: [B, N, C] or packed [T, C]; any outer strides, channels contiguous.
        weight: [C, W], or one a node, [B, N, C, W] or [T, C, W]; any strides. Oldest tap first.
        bias: [C] or None.
        state: pool [slots, C, L], L >= W - 1, any strides, oldest input first. Never written.
        slots: int32 or int64 [B], contiguous; -1 marks a padding row.
        tree: the topology, of the same capacity as x.
        silu: whether SiLU follows.
        out: the shape of x, channels contiguous; written by the backend.
        pending: inputs that are not in the state yet, or None.
        capture: buffer to copy x to, or None.
        variant: pinned kernel configuration, or None.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    state: torch.Tensor
    slots: torch.Tensor
    tree: TreeBatch
    silu: bool
    out: torch.Tensor
    pending: ConvPending | None = None
    capture: ConvFactors | None = None
    variant: Config | None = None

    @property
    def width(self) -> int:
        """W, taps of the convolution."""
        return self.weight.shape[-1]

    @property
    def dynamic(self) -> bool:
        """Whether every node has a weight of its own."""
        return self.weight.dim() > 2


@dataclass(slots=True, eq=False)
class ConvCommitLayer:
    """One layer of a commit: the pool it updates and the factors of its convolution."""

    pool: torch.Tensor
    factors: ConvFactors


@dataclass(slots=True, eq=False)
class ConvCommitCall:
    """One commit, of one or several layers that share slots, accepted nodes and tree.

    Attributes:
        layers: pools and factors.
        slots: int32 or int64 [B], contiguous; -1 marks a padding row.
        accepted: int32 or int64 [B], contiguous; terminal node, request-local; -1 leaves the row's state untouched.
        tree: the topology of the convolution.
        variant: pinned kernel configuration, or None.
    """

    layers: tuple[ConvCommitLayer, ...]
    slots: torch.Tensor
    accepted: torch.Tensor
    tree: TreeBatch
    variant: Config | None = None
