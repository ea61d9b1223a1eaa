"""What an acceptance returns."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from bole_runtime.tree import TreeBatch

#: Bits of ``Acceptance.status``: a visited row of target logits had a NaN, +inf or no finite value; a visited row of
#: draft probabilities had a NaN, a negative or an infinite value; a predicted token is outside the vocabulary.
STATUS_LOGITS, STATUS_DRAFT, STATUS_TOKEN = 1, 2, 4


@dataclass(frozen=True, eq=False)
class Acceptance:
    """The outcome of a round, on the device. D = ``tree.max_depth``; requests without a live node hold -1 and 0.

    Attributes:
        accepted: int32 [B], terminal node, request-local; what :func:`bole_runtime.commit` takes.
        path: int32 [B, D + 1], the accepted nodes from the root (node 0) to the terminal node, then -1.
        lengths: int32 [B], nodes on the path. That many tokens are new in this round: one for each accepted draft
            below the root, and the bonus.
        bonus: int64 [B], the token emitted at the terminal node; node 0 of the next round.
        tokens: int64 [B, D + 1], the new tokens of the round in order, the bonus last, then -1.
        source: int64 [B, D + 1], flat row of each node of the path (``b * max_nodes + node``, or packed
            ``offsets[b] + node``), then -1.
        target: int64 [B, D + 1], flat row where a compacted cache keeps that node (``b * max_nodes + j`` or
            ``offsets[b] + j``), then -1. See :func:`bole_runtime.sampling.compact_`.
        status: int32 [B], 0 or bits: 1 target logits not usable, 2 draft probabilities not usable, 4 predicted token
            negative.
    """

    accepted: torch.Tensor
    path: torch.Tensor
    lengths: torch.Tensor
    bonus: torch.Tensor
    tokens: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    status: torch.Tensor

    @classmethod
    @torch.inference_mode(False)  # tensors that live on are no inference tensors
    def empty(cls, tree: TreeBatch) -> Acceptance:
        """Return buffers for the capacities of a tree, to be passed as ``out`` (for CUDA graphs)."""
        batch, steps = tree.max_batch, tree.max_depth + 1

        def made(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.full(shape, -1, dtype=dtype, device=tree.device)

        return cls(
            accepted=made(torch.int32, batch),
            path=made(torch.int32, batch, steps),
            lengths=made(torch.int32, batch).zero_(),
            bonus=made(torch.int64, batch),
            tokens=made(torch.int64, batch, steps),
            source=made(torch.int64, batch, steps),
            target=made(torch.int64, batch, steps),
            status=made(torch.int32, batch).zero_(),
        )

    def check_fits(self, tree: TreeBatch, name: str = "out") -> None:
        """Check that these buffers have the shapes, dtypes and device that :meth:`empty` would give.

        Raises:
            ValueError: one does not.
        """
        batch, steps = tree.max_batch, tree.max_depth + 1
        for field in fields(self):
            given: torch.Tensor = getattr(self, field.name)
            wide = field.name in ("path", "tokens", "source", "target")
            shape = (batch, steps) if wide else (batch,)
            dtype = torch.int64 if field.name in ("bonus", "tokens", "source", "target") else torch.int32
            if (tuple(given.shape), given.dtype, given.device) != (shape, dtype, tree.device):
                raise ValueError(
                    f"{name}.{field.name}: expected {dtype} {shape} on {tree.device}, "
                    f"got {given.dtype} {tuple(given.shape)} on {given.device}"
                )
            if not given.is_contiguous():
                raise ValueError(f"{name}.{field.name}: must be contiguous")
