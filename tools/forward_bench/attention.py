"""Attention of tree nodes over a cache of keys and values: every node sees the context, its ancestors and itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

#: ``parts``: the context by flash attention without a mask, the tree by itself, joined by their sums, as engines do.
#: ``masked``: one call of scaled_dot_product_attention over context and tree with a mask.
METHODS = ("parts", "masked")


def context_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to keys that all queries see.

    Args:
        q: [B, H, R, D].
        k: [B, H, S, D].
        v: [B, H, S, D].

    Returns:
        The output [B, H, R, D], and the logarithm of the sum of the weights, fp32 [B, H, R].
    """
    if q.device.type == "cuda":
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention  # the public function keeps the sums to itself
        out, sums = flash(q, k, v)[:2]
        return out, sums
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
    return (scores.softmax(-1).to(v.dtype) @ v), scores.logsumexp(-1)


def tree_bias(seen: torch.Tensor, group: int, context: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what is added to the scores, [B, 1, N * group, context + N]: 0 where a node is seen, else -inf.

    Args:
        seen: bool [B, N, N], each node's ancestors and itself.
        group: query heads a key head; they are rows beside each other, so that keys are not repeated.
        context: columns in front that all see.
        dtype: of the bias.
    """
    bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
    return F.pad(bias, (context, 0)).repeat_interleave(group, 1).unsqueeze(1)


class TreeAttention:
    """Attention of one step, all layers: made in every step from the trees as they are then."""

    def __init__(self, seen: torch.Tensor, group: int, context: int, method: str, dtype: torch.dtype) -> None:
        """Prepare the mask.

        Args:
            seen: bool [B, N, N].
            group: query heads a key head.
            context: committed tokens in front of the trees.
            method: one of :data:`METHODS`.
            dtype: of queries and keys.
        """
        self._nodes, self._group, self._context = seen.shape[1], group, context
        self._masked = method == "masked"
        # One node sees all there is: plain decoding needs no mask.
        self._bias: torch.Tensor | None = None
        if self._nodes > 1:
            self._bias = tree_bias(seen, group, context if self._masked else 0, dtype if self._masked else torch.float)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend.

        Args:
            q: [B, N, HQ, D].
            k: [B, context + N, HK, D], of cache and tree; HQ = HK * group.
            v: likewise.

        Returns:
            [B, N, HQ, D].
        """
        batch, nodes, heads, size = q.shape
        rows = q.unflatten(2, (-1, self._group)).transpose(1, 2).flatten(2, 3)
        keys, values = k.transpose(1, 2), v.transpose(1, 2)
        if self._bias is None:
            out = context_attention(rows, keys, values)[0]
        elif self._masked:
            out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=self._bias)
        else:
            c = self._context
            before, sums = context_attention(rows, keys[:, :, :c], values[:, :, :c])
            scores = torch.add(self._bias, rows @ keys[:, :, c:].mT, alpha=size**-0.5)
            # The context is one more column, of the weight of all its keys together.
            weights = torch.cat((sums.unsqueeze(-1), scores), -1).softmax(-1).to(v.dtype)
            out = torch.addcmul(weights[..., 1:] @ values[:, :, c:], weights[..., :1], before)
        return out.unflatten(2, (nodes, self._group)).transpose(1, 2).reshape(batch, nodes, heads, size)
