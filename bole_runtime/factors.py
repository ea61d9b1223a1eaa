"""State factors: what verification leaves behind so that a commit can rebuild the accepted state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from bole_runtime.families import get_family

if TYPE_CHECKING:
    from bole_runtime.calls import VerifyCall
    from bole_runtime.families.spec import RecurrenceSpec
    from bole_runtime.tree import TreeBatch


@dataclass(slots=True, eq=False)
class PendingChain:
    """Accepted tokens that are not in the state yet: a chain of ancestors above every root, one ring a slot.

    Token t of slot s is row ``(start[s] + t) % capacity``, for t below ``length[s]``.

    Attributes:
        k: [slots, capacity, HK, dk], raw keys, the dtype of the call's k.
        v: [slots, capacity, HV, dv].
        gates: ready gates (``g`` and ``beta``), [slots, capacity, HV], fp32 (fp64 for fp64 keys), whatever the gate
            mode of the call: a ring is filled from captured factors. All of one layout.
        length: int32 [slots], 0 to capacity.
        start: int32 [slots], 0 to capacity - 1.
    """

    k: torch.Tensor
    v: torch.Tensor
    gates: dict[str, torch.Tensor]
    length: torch.Tensor
    start: torch.Tensor

    @property
    def capacity(self) -> int:
        """Rows of a ring."""
        return self.k.shape[1]


@dataclass(slots=True, eq=False)
class Factors:
    """Raw inputs of a verification, kept for the commit.

    The tensors alias the caller's unless buffers were given to ``verify(factors=...)``; aliased tensors must stay
    alive and unchanged until the commit.

    Attributes:
        spec: the family.
        gate_mode: mode of ``gates``: ``ready`` for captured factors, whatever the call had.
        k: [B, N, HK, dk] or packed [T, HK, dk].
        v: [B, N, HV, dv] or packed [T, HV, dv].
        gates: per node and head, and the per-head parameters of the mode.
        beta_scale: factor of sigmoid(b) in raw mode.
        qk_l2norm: whether k is l2-normalised.
        tree: the topology that was verified.
        pending: the pending chain that was verified on top of, or None.
    """

    spec: RecurrenceSpec
    gate_mode: str
    k: torch.Tensor
    v: torch.Tensor
    gates: dict[str, torch.Tensor]
    beta_scale: float
    qk_l2norm: bool
    tree: TreeBatch
    pending: PendingChain | None = None

    @classmethod
    def allocate(
        cls,
        tree: TreeBatch,
        *,
        key_heads: int,
        value_heads: int,
        dk: int,
        dv: int,
        dtype: torch.dtype = torch.bfloat16,
        recurrence: str | RecurrenceSpec = "gdn",
        device: torch.device | str | None = None,
    ) -> Factors:
        """Allocate buffers for ``verify(factors=...)``, of the tree's capacity.

        k and v keep the input dtype, the gates are stored ready, in float32 (float64 for float64 inputs). Zero-filled.

        Args:
            tree: decides dense [max_batch, max_nodes] or packed [max_total] rows.
            key_heads: HK.
            value_heads: HV, a multiple of HK.
            dk: key head dimension.
            dv: value head dimension.
            dtype: dtype of the k and v that will be captured.
            recurrence: family name or spec.
            device: default, the tree's.

        Raises:
            ValueError: HV is not a multiple of HK, or the family is unknown.
        """
        spec = get_family(recurrence) if isinstance(recurrence, str) else recurrence
        if key_heads < 1 or value_heads < 1 or value_heads % key_heads:
            raise ValueError(f"value_heads: {value_heads} is not a positive multiple of key_heads = {key_heads}")
        lead = tree.lead
        device = tree.device if device is None else torch.device(device)
        gate_dtype = torch.float64 if dtype is torch.float64 else torch.float32
        return cls(
            spec=spec,
            gate_mode="ready",
            k=torch.zeros(*lead, key_heads, dk, dtype=dtype, device=device),
            v=torch.zeros(*lead, value_heads, dv, dtype=dtype, device=device),
            gates={
                i.name: torch.zeros(*lead, value_heads, dtype=gate_dtype, device=device)
                for i in spec.node_gates("ready")
            },
            beta_scale=1.0,
            qk_l2norm=spec.qk_l2norm,
            tree=tree,
        )

    @property
    def nbytes_per_node(self) -> int:
        """Bytes kept for one node: k, v and the per-node gates; per-head parameters do not count."""
        rows = [self.k, self.v, *(self.gates[i.name] for i in self.spec.node_gates(self.gate_mode))]
        skip = 1 if self.tree.is_packed else 2
        return sum(t.element_size() * t.shape[skip:].numel() for t in rows)

    def replace(self, **changes: object) -> Factors:
        """Return a copy with some fields changed; tensors are shared."""
        return replace(self, **changes)  # type: ignore[arg-type]


def factors_of(call: VerifyCall) -> Factors:
    """Return the factors of a call: its own tensors, or its capture buffers once a backend has filled them."""
    capture = call.capture
    if capture is None:
        return Factors(
            call.spec, call.gate_mode, call.k, call.v, call.gates, call.beta_scale, call.qk_l2norm, call.tree,
            call.pending,
        )  # fmt: skip
    return Factors(
        call.spec, capture.gate_mode, capture.k, capture.v, capture.gates, 1.0, call.qk_l2norm, call.tree, call.pending
    )  # fmt: skip


def ready_gates(
    spec: RecurrenceSpec, gates: Mapping[str, torch.Tensor], mode: str, beta_scale: float
) -> dict[str, torch.Tensor]:
    """Return the ready gates in float64: bf16 or fp32 gates in, nothing rounded on the way."""
    if mode == "raw":
        return spec.to_ready(gates, beta_scale)
    return {i.name: gates[i.name].double() for i in spec.node_gates("ready")}


def capture_eager(call: VerifyCall) -> None:
    """Fill the capture buffers of a call with torch operations, for backends without a fused capture."""
    capture = call.capture
    if capture is None:
        return
    capture.k.copy_(call.k)
    capture.v.copy_(call.v)
    for name, gate in ready_gates(call.spec, call.gates, call.gate_mode, call.beta_scale).items():
        capture.gates[name].copy_(gate)
