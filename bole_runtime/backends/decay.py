"""Cumulative decay along a tree: factors of the state, and Gram matrices of decayed vectors.

Exponents are differences over a row and one of its ancestors, so they are never positive. e^G_i * e^-G_j is never
formed: with a strong gate in between, one of them overflows. Masks come before exponentials: between unrelated rows a
difference can be large and positive.
"""

from __future__ import annotations

import math

import torch

#: e^-10000 is 0 in float64 too, so clamping a log-decay there changes nothing and keeps the integer parts exact.
_MIN_LOG_DECAY = -1e4
#: Elements of the largest temporary of a Gram matrix with a decay per channel.
_MAX_ELEMENTS = 1 << 24

_Split = tuple[torch.Tensor, torch.Tensor]


def per_value_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat dimension 1, key heads, for the value heads that read it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


class Decay:
    """Decay of the rows of a batch slice.

    ``before`` selects the sum over strict ancestors alone: the decay up to the parent, whose state an update sees
    before its own decay.
    """

    def __init__(self, log_decay: torch.Tensor | None, mask: torch.Tensor, heads: int, dtype: torch.dtype) -> None:
        """Prepare the sums.

        Args:
            log_decay: float64 [B, M, HV], or [B, M, HV, dk] for one a key channel, or None for no decay; zero in dead
                rows.
            mask: bool [B, M, M], row i marks i and its strict ancestors.
            heads: HV.
            dtype: of the results.
        """
        self._g = None if log_decay is None else log_decay.clamp(min=_MIN_LOG_DECAY)
        self._mask, self._heads, self._dtype = mask, heads, dtype
        self._channel = log_decay is not None and log_decay.dim() == 4
        self._totals: dict[bool, torch.Tensor] = {}
        self._pairs: dict[bool, torch.Tensor] = {}
        self._channel_pairs: dict[bool, torch.Tensor] = {}

    def _strict(self) -> torch.Tensor:
        return self._mask & ~torch.eye(self._mask.shape[-1], dtype=torch.bool, device=self._mask.device)

    def _rows(self, before: bool) -> torch.Tensor:
        return self._strict() if before else self._mask

    def _total(self, before: bool) -> torch.Tensor:
        """Return the sums in float64, [B, HV, M] or [B, HV, M, dk]."""
        total = self._totals.get(before)
        if total is None:
            assert self._g is not None
            g = self._g
            summed = (self._rows(before).double() @ g.flatten(2)).reshape(g.shape)
            total = self._totals[before] = summed.transpose(1, 2).contiguous()
        return total

    def _split(self, before: bool) -> _Split:
        """Return the sums as an integer and a fraction of at most one half, so that a difference in the compute dtype
        is exact to the fraction's rounding whatever the size of the sum."""
        total = self._total(before)
        whole = total.round()
        return whole.to(self._dtype), (total - whole).to(self._dtype)

    def scaled(self, x: torch.Tensor, before: bool) -> torch.Tensor:
        """Return e^G o x for the last rows, [B, HV, N, dk], of x [B, HK or HV, N, dk]."""
        x = per_value_head(x, self._heads)
        if self._g is None:
            return x
        factor = self._total(before)[:, :, -x.shape[2] :].exp().to(self._dtype)
        return x * (factor if self._channel else factor.unsqueeze(-1))

    def _pair_factors(self, before: bool) -> torch.Tensor:
        """Return e^(G_i - G_j), [B, HV, M, M], zero where j is no ancestor; with a decay a head."""
        pairs = self._pairs.get(before)
        if pairs is None:
            whole_i, part_i = self._split(before)
            whole_j, part_j = self._split(False)
            difference = (whole_i[..., :, None] - whole_j[..., None, :]) + (part_i[..., :, None] - part_j[..., None, :])
            mask = self._rows(before).unsqueeze(1)
            pairs = self._pairs[before] = difference.masked_fill(~mask, float("-inf")).exp()
        return pairs

    def gram(self, x: torch.Tensor, y: torch.Tensor, before: bool, strict: bool = False) -> torch.Tensor:
        """Return the products x_i . (e^(G_i - G_j) o y_j), [B, HV, N, M], zero where j is no ancestor of i.

        Args:
            x: [B, HK or HV, N, dk], the last N rows.
            y: [B, HK or HV, M, dk].
            before: whether G_i leaves out the row's own decay; implies ``strict``.
            strict: whether j = i is left out.
        """
        strict = strict or before
        if self._channel:
            return self._channel_gram(per_value_head(x, self._heads), per_value_head(y, self._heads), before, strict)
        shared = max(x.shape[1], y.shape[1])
        products = per_value_head(x, shared) @ per_value_head(y, shared).transpose(-1, -2)
        products = per_value_head(products, self._heads)
        nodes = x.shape[2]
        if self._g is not None:
            products = products * self._pair_factors(before)[:, :, -nodes:]
            if before or not strict:
                return products
        return products.masked_fill(~self._rows(strict)[:, -nodes:].unsqueeze(1), 0)

    def _channel_gram(self, x: torch.Tensor, y: torch.Tensor, before: bool, strict: bool) -> torch.Tensor:
        batch, heads, nodes, dk = x.shape
        rows = y.shape[2]
        first = rows - nodes
        step = max(1, _MAX_ELEMENTS // max(1, batch * heads * rows * dk))
        if step >= rows:
            factor = self._channel_pairs.get(before)
            if factor is None:
                # Of every row, for the other products that share it.
                factor = self._channel_pairs[before] = self._channel_factor(before, slice(0, rows))
            products = ((factor[:, :, first:] * y[:, :, None]) @ x.unsqueeze(-1)).squeeze(-1)
        else:
            products = x.new_empty(batch, heads, nodes, rows)
            for i in range(0, nodes, step):
                factor = self._channel_factor(before, slice(first + i, min(first + i + step, rows)))
                products[:, :, i : i + step] = (factor.mul_(y[:, :, None]) @ x[:, :, i : i + step, :, None]).squeeze(-1)
        if before or not strict:
            return products
        return products.masked_fill(~self._rows(True)[:, first:].unsqueeze(1), 0)

    def _channel_factor(self, before: bool, at: slice) -> torch.Tensor:
        """Return e^(G_i - G_j) of some rows i, [B, HV, rows, M, dk], zero where j is no ancestor."""
        whole_i, part_i = (t[:, :, at, None] for t in self._split(before))
        whole_j, part_j = (t[:, :, None] for t in self._split(False))
        difference = (whole_i - whole_j).add_(part_i).sub_(part_j)
        difference.masked_fill_(~self._rows(before)[:, None, at, :, None], float("-inf"))
        # Below the smallest normal number there is nothing to add, and CPUs are slow there.
        lowest = math.log(torch.finfo(self._dtype).tiny)
        return difference.masked_fill_(difference < lowest, float("-inf")).exp_()

    def to_row(self, last: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the decay of the state up to one row of each request, and that of every row's update up to it.

        Args:
            last: int64 [B].

        Returns:
            [B, HV, 1, 1 or dk] (None without a decay), and [B, 1 or HV, M, 1 or dk], zero where a row is no ancestor.
        """
        at = torch.arange(last.shape[0], device=last.device)
        mask = self._mask[at, last][:, None, :, None]
        if self._g is None:
            return None, mask.to(self._dtype)
        total = self._total(False)[at, :, last].exp().to(self._dtype)
        whole, part = self._split(False)
        difference = (whole[at, :, last].unsqueeze(2) - whole) + (part[at, :, last].unsqueeze(2) - part)
        if not self._channel:
            total, difference = total.unsqueeze(-1), difference.unsqueeze(-1)
        return total.unsqueeze(2), difference.masked_fill(~mask, float("-inf")).exp()
