"""What whole layers share: their factors, their commit, and which rows are live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bole_runtime.api import commit
from bole_runtime.conv import ConvFactors, conv_commit
from bole_runtime.factors import Factors
from bole_runtime.tree import TreeBatch


@dataclass(slots=True, eq=False)
class LayerFactors:
    """What a commit needs of a layer: raw inputs of the convolution; k, v and gate inputs of the recurrence."""

    conv: ConvFactors
    recurrence: Factors


def live_rows(tree: TreeBatch, slots: torch.Tensor, pool_slots: int) -> torch.Tensor:
    """Return which rows are live nodes of requests that are no padding, bool of the shape ``tree.lead``."""
    index, live = tree.rows()
    live = live & ((slots >= 0) & (slots < pool_slots)).unsqueeze(1)
    rows = torch.zeros(tree.max_total + 1, dtype=torch.bool, device=tree.device)
    # Rows that are not live land in one extra row, which is dropped.
    rows[torch.where(live, index, tree.max_total)] = live
    return rows[:-1].reshape(tree.lead)


def commit_layers(
    conv_pools: Sequence[torch.Tensor],
    pools: Sequence[torch.Tensor],
    slots: torch.Tensor,
    factors: Sequence[LayerFactors],
    accepted: torch.Tensor,
    *,
    precision: str = "lossless",
) -> None:
    """Advance both states of all layers along the accepted paths: one launch a geometry and kind of state.

    Args:
        conv_pools: one a layer, [slots, C, L].
        pools: one a layer, [slots, HV, dv, dk].
        slots: int32 or int64 [B]; -1 marks a padding row. A live slot may occur once.
        factors: one a layer, of the same tree.
        accepted: int32 or int64 [B]; terminal node, request-local; -1 leaves both states of the row bit-identical.
        precision: ``lossless`` or ``fast``.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: a wrong shape, device or value, or a different number of pools and factors.
    """
    if not len(conv_pools) == len(pools) == len(factors):
        raise ValueError(
            f"conv_pools, pools, factors: expected the same number of layers, got {len(conv_pools)}, {len(pools)} and "
            f"{len(factors)}"
        )
    conv_commit(list(conv_pools), slots, [f.conv for f in factors], accepted)
    commit(list(pools), slots, [f.recurrence for f in factors], accepted, precision=precision)
