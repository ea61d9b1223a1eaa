"""Factors of a convolution: its raw inputs, kept until the commit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from bole_runtime.families.spec import DATA_DTYPES
from bole_runtime.kernels.conv_problem import WIDTHS

if TYPE_CHECKING:
    from bole_runtime.tree import TreeBatch


@dataclass(slots=True, eq=False)
class ConvPending:
    """Raw inputs of accepted tokens that are not in the convolution state yet, one ring a slot.

    Token t of slot s is row ``(start[s] + t) % capacity``, for t below ``length[s]``: the layout of
    :class:`~bole_runtime.factors.PendingChain`, whose ``length`` and ``start`` may be the same tensors. Only needed
    where the convolution state is not committed every round.

    Attributes:
        x: [slots, capacity, C], the dtype of the call's x; any outer strides, channels contiguous.
        length: int32 [slots], 0 to capacity.
        start: int32 [slots], 0 to capacity - 1.
    """

    x: torch.Tensor
    length: torch.Tensor
    start: torch.Tensor

    @property
    def capacity(self) -> int:
        """Rows of a ring."""
        return self.x.shape[1]


@dataclass(slots=True, eq=False)
class ConvFactors:
    """Raw inputs of one convolution, kept for :func:`~bole_runtime.conv_commit`.

    ``x`` aliases the caller's tensor unless buffers were given to ``tree_conv(factors=...)``; an aliased tensor must
    stay alive and unchanged until the commit.

    Attributes:
        x: [B, N, C] or packed [T, C]; any outer strides, channels contiguous.
        width: W of the convolution, 2 to 8.
        tree: the topology.
        pending: the pending inputs that the call read, or None.
    """

    x: torch.Tensor
    width: int
    tree: TreeBatch
    pending: ConvPending | None = None

    @classmethod
    @torch.inference_mode(False)  # tensors that live on are no inference tensors
    def allocate(
        cls,
        tree: TreeBatch,
        *,
        channels: int,
        width: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> ConvFactors:
        """Allocate a buffer for ``tree_conv(factors=...)``, of the tree's capacity. Zero-filled.

        Args:
            tree: decides dense [max_batch, max_nodes] or packed [max_total] rows.
            channels: C.
            width: W, 2 to 8.
            dtype: of the x that will be captured.
            device: default, the tree's.

        Raises:
            TypeError: no tree, or a dtype that x cannot have.
            ValueError: ``channels`` is below 1 or ``width`` outside 2 to 8.
        """
        from bole_runtime.tree import TreeBatch

        if not isinstance(tree, TreeBatch):
            raise TypeError(f"tree: expected a TreeBatch, got {type(tree).__name__}")
        if dtype not in DATA_DTYPES:
            raise TypeError(f"dtype: {dtype!r} is not allowed; allowed: {', '.join(map(str, DATA_DTYPES))}")
        if channels < 1:
            raise ValueError(f"channels: {channels} is not allowed; allowed: 1 or more")
        if width not in WIDTHS:
            raise ValueError(f"width: {width} is not allowed; allowed: {WIDTHS[0]} to {WIDTHS[-1]}")
        device = tree.device if device is None else torch.device(device)
        return cls(torch.zeros(*tree.lead, channels, dtype=dtype, device=device), width, tree)

    @property
    def nbytes_per_node(self) -> int:
        """Bytes kept for one node."""
        return self.x.element_size() * self.x.shape[-1]

    def replace(self, **changes: object) -> ConvFactors:
        """Return a copy with some fields changed; tensors are shared."""
        return replace(self, **changes)  # type: ignore[arg-type]
