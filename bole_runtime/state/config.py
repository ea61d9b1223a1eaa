"""The sizes and choices of a state manager, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bole_runtime.families.spec import DATA_DTYPES
from bole_runtime.kernels.problem import PENDING_BUCKETS
from bole_runtime.state.geometry import LayerGeometry, check_layers
from bole_runtime.tree.check import check_capacity
from bole_runtime.tree.tree import MAX_NODES
from bole_runtime.validate import PRECISIONS

#: When accepted tokens are folded into the states; see docs/runtime.md.
POLICIES = ("eager", "fused", "deferred")


@dataclass(frozen=True)
class StateConfig:
    """Everything the memory of a state manager depends on. Made by :func:`state_config`.

    Attributes:
        layers: geometry of every recurrent layer, in the order of the model.
        slots: rows of the state pools: live requests and forks.
        max_batch: most rows of a round.
        max_nodes: most nodes of one request.
        max_total: most nodes of a whole batch; factors are kept for this many.
        max_depth: largest number of strict ancestors of a node.
        policy: ``eager``, ``fused`` or ``deferred``.
        pending: tokens that a slot's pending chain can hold; 0 under ``eager``.
        flush_at: a chain that would grow beyond this is folded into the state instead; at most ``pending``.
        dtype: of q, k, v and of what the convolution reads.
        state_dtype: of the recurrent pools.
        conv_dtype: of the convolution pools.
        precision: ``lossless`` or ``fast``.
    """

    layers: tuple[LayerGeometry, ...]
    slots: int
    max_batch: int
    max_nodes: int
    max_total: int
    max_depth: int
    policy: str
    pending: int
    flush_at: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    conv_dtype: torch.dtype
    precision: str


def _dtype(name: str, value: object) -> torch.dtype:
    if not isinstance(value, torch.dtype) or value not in DATA_DTYPES:
        raise TypeError(f"{name}: {value!r} is not allowed; allowed: {', '.join(map(str, DATA_DTYPES))}")
    return value


def state_config(
    layers: Sequence[LayerGeometry],
    *,
    slots: int,
    max_batch: int,
    max_nodes: int,
    max_total: int | None = None,
    max_depth: int | None = None,
    policy: str = "eager",
    pending: int | None = None,
    flush_at: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    conv_dtype: torch.dtype | None = None,
    precision: str = "lossless",
) -> StateConfig:
    """Check and complete the arguments that :class:`~bole_runtime.StateManager` and ``plan_memory`` share.

    Args:
        layers: geometry of every recurrent layer.
        slots: rows of the state pools.
        max_batch: most rows of a round.
        max_nodes: most nodes of one request, 1 to 512.
        max_total: most nodes of a whole batch; default ``max_batch * max_nodes``.
        max_depth: largest number of strict ancestors of a node; default ``max_nodes - 1``.
        policy: ``eager``, ``fused`` or ``deferred``.
        pending: tokens a chain can hold. Default: 32 under ``deferred``; under ``fused`` the longest path, at most 64.
        flush_at: default, ``pending``.
        dtype: of q, k and v.
        state_dtype: of the recurrent pools.
        conv_dtype: of the convolution pools; default ``dtype``, in which their content is exact.
        precision: ``lossless`` or ``fast``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a size or name is out of range.
    """
    parts = check_layers(layers)
    check_capacity("slots", slots, 1, 2**31 - 2)
    check_capacity("max_batch", max_batch, 1, slots)
    check_capacity("max_nodes", max_nodes, 1, MAX_NODES)
    total = max_batch * max_nodes if max_total is None else max_total
    check_capacity("max_total", total, 1, 2**31 - 1)
    depth = max_nodes - 1 if max_depth is None else max_depth
    check_capacity("max_depth", depth, 0, max_nodes - 1)
    for name, value, allowed in (("policy", policy, POLICIES), ("precision", precision, PRECISIONS)):
        if value not in allowed:
            raise ValueError(f"{name}: {value!r} is not allowed; allowed: {', '.join(allowed)}")
    if policy == "eager":
        if pending not in (None, 0) or flush_at is not None:
            raise ValueError("pending, flush_at: the eager policy keeps no pending chain; leave them out")
        chain = limit = 0
    else:
        default = 32 if policy == "deferred" else min(depth + 1, PENDING_BUCKETS[-1])
        chain = check_capacity("pending", default if pending is None else pending, 1, PENDING_BUCKETS[-1])
        limit = check_capacity("flush_at", chain if flush_at is None else flush_at, 0, chain)
    return StateConfig(
        parts, slots, max_batch, max_nodes, total, depth, policy, chain, limit, _dtype("dtype", dtype),
        _dtype("state_dtype", state_dtype), _dtype("conv_dtype", dtype if conv_dtype is None else conv_dtype),
        precision,
    )  # fmt: skip
