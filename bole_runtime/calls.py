"""Normalised calls: what ``verify`` and ``commit`` hand to a backend after validation.

The classes are not frozen only because a frozen dataclass takes microseconds more to build; treat them as immutable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from bole_runtime.factors import NO_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from bole_runtime.factors import Factors, PendingChain
    from bole_runtime.families.spec import RecurrenceSpec
    from bole_runtime.kernels.space import Config
    from bole_runtime.tree import TreeBatch


@dataclass(slots=True, eq=False)
class VerifyCall:
    """One verification.

    Attributes:
        spec: the family.
        q: [B, N, HK, dk] or packed [T, HK, dk]; any outer strides, last dimension contiguous. Same for k and v.
        k: as q.
        v: [B, N, HV, dv] or packed [T, HV, dv].
        gates: tensors only. Per node [B, N, HV, ...] or [T, HV, ...], per head [HV, ...], as the family declares;
            last dimension contiguous.
        gate_mode: ``ready`` or ``raw``.
        beta_scale: factor of sigmoid(b) in raw mode, else 1.0.
        state: pool [slots, HV, dv, dk], dk contiguous. Never written.
        slots: int32 or int64 [B], contiguous; -1 marks a padding row.
        tree: the topology, of the same capacity as q, k and v.
        precision: ``fast`` or ``lossless``.
        scale: factor of q.
        qk_l2norm: whether q and k are l2-normalised.
        out: [B, N, HV, dv] or [T, HV, dv], last dimension contiguous; written by the backend.
        pending: accepted tokens that are not in the state yet, or None.
        capture: buffers to fill with k, v and ready gates, or None.
        workspace: scratch memory of the caller, or None.
        variant: pinned kernel configuration, or None.
        options: floats of the gate mode other than ``beta_scale``.
    """

    spec: RecurrenceSpec
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gates: dict[str, torch.Tensor]
    gate_mode: str
    beta_scale: float
    state: torch.Tensor
    slots: torch.Tensor
    tree: TreeBatch
    precision: str
    scale: float
    qk_l2norm: bool
    out: torch.Tensor
    pending: PendingChain | None = None
    capture: Factors | None = None
    workspace: torch.Tensor | None = None
    variant: Config | None = None
    options: Mapping[str, float] = field(default_factory=lambda: NO_OPTIONS)


class RowAction(IntEnum):
    """What a commit does with one row; decided on the device, so a captured graph can change its mind.

    Every action but ``COMMIT`` is about the row's pending chain, which the factors must have.
    """

    #: Nothing: state and ring keep their bits.
    NONE = 0
    #: Fold the pending chain and then the accepted path into the state.
    COMMIT = 1
    #: Fold the pending chain alone into the state.
    FLUSH = 2
    #: Copy the accepted path behind the pending chain; the state keeps its bits.
    APPEND = 3


@dataclass(slots=True, eq=False)
class CommitLayer:
    """One layer of a commit: the pool it updates and the factors of its verification."""

    pool: torch.Tensor
    factors: Factors


@dataclass(slots=True, eq=False)
class CommitCall:
    """One commit, of one or several layers that share slots, accepted nodes and tree.

    Attributes:
        spec: the family of every layer.
        layers: pools and factors.
        slots: int32 or int64 [B], contiguous; -1 marks a padding row.
        accepted: int32 or int64 [B], contiguous; terminal node, request-local; -1 leaves the row's state untouched.
        tree: the topology of the verification.
        precision: ``fast`` or ``lossless``.
        variant: pinned kernel configuration, or None.
        actions: int32 [B], contiguous, a :class:`RowAction` a row; None: ``COMMIT`` everywhere.
    """

    spec: RecurrenceSpec
    layers: tuple[CommitLayer, ...]
    slots: torch.Tensor
    accepted: torch.Tensor
    tree: TreeBatch
    precision: str
    variant: Config | None = None
    actions: torch.Tensor | None = None
