"""What whole layers share: their factors, their commit, and which rows are live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bole_runtime.api import checked_commit
from bole_runtime.conv import ConvFactors
from bole_runtime.conv.api import checked_conv_commit
from bole_runtime.factors import Factors
from bole_runtime.tree import TreeBatch
from bole_runtime.tree.check import check_capacity, check_dense
from bole_runtime.validate import as_tuple, not_a


@dataclass(slots=True, eq=False)
class LayerFactors:
    """What a commit needs of a layer: raw inputs of the convolution; k, v and gate inputs of the recurrence."""

    conv: ConvFactors
    recurrence: Factors


def check_sizes(**sizes: object) -> None:
    """Check that sizes of a layer are ints above 0.

    Raises:
        TypeError: one is no int.
        ValueError: one is below 1.
    """
    for name, size in sizes.items():
        check_capacity(name, size, 1, 2**31 - 1)


def check_parameter(name: str, tensor: object, size: int, vector: bool = True) -> None:
    """Check a parameter of a layer: one value a row, or taps a row.

    Raises:
        TypeError: not a tensor.
        ValueError: another shape.
    """
    if not isinstance(tensor, torch.Tensor):
        not_a(name, tensor, "a torch.Tensor")
    check_dense(name, tensor)
    shape = tuple(tensor.shape)
    if shape[:1] != (size,) or len(shape) != (1 if vector else 2):
        raise ValueError(f"{name}: expected shape {f'({size},)' if vector else f'({size}, W)'}, got {shape}")


def check_columns(name: str, tensor: object, columns: int) -> None:
    """Check the output of a packed projection.

    Raises:
        TypeError: not a tensor.
        ValueError: another number of columns.
    """
    if not isinstance(tensor, torch.Tensor):
        not_a(name, tensor, "a torch.Tensor")
    check_dense(name, tensor)
    if tensor.dim() == 0 or tensor.shape[-1] != columns:
        raise ValueError(f"{name}: expected {columns} columns, got shape {tuple(tensor.shape)}")


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
        ValueError: a wrong shape, device or value, or a different number of pools and factors. Nothing has been
            written.
    """
    convs = as_tuple("conv_pools", conv_pools, "a torch.Tensor")
    states = as_tuple("pools", pools, "a torch.Tensor")
    parts = as_tuple("factors", factors, "a LayerFactors")
    if not len(convs) == len(states) == len(parts):
        raise ValueError(
            f"conv_pools, pools, factors: expected the same number of layers, got {len(convs)}, {len(states)} and "
            f"{len(parts)}"
        )
    for n, part in enumerate(parts):
        if not isinstance(part, LayerFactors):
            not_a(f"factors[{n}]", part, "a LayerFactors")
    # Both are checked before one of them writes: a state that moved alone could not be told from one that did not.
    convolutions = checked_conv_commit(convs, slots, [f.conv for f in parts], accepted)
    recurrences = checked_commit(states, slots, [f.recurrence for f in parts], accepted, precision=precision)
    if parts[0].conv.tree is not parts[0].recurrence.tree:
        raise ValueError("factors: convolution and recurrence are of different trees")
    convolutions()
    recurrences()
