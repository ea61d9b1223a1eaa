"""The fewest bytes and operations of a verify or a commit, and the time the memory floor gives.

The floor counts each input read once and each output written once. Ancestor words and slots are left out: they
are a few bytes a node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bole_runtime.families import get_family

ITEMSIZE: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


def _size(dtype: str) -> int:
    try:
        return ITEMSIZE[dtype]
    except KeyError:
        raise ValueError(f"unknown dtype {dtype!r}; known: {sorted(ITEMSIZE)}") from None


@dataclass(frozen=True)
class Workload:
    """One layer's call, as far as its traffic goes.

    Attributes:
        batch: live requests B.
        nodes: nodes N of every request (padding not counted).
        hk: key heads.
        hv: value heads.
        dk: key head dimension.
        dv: value head dimension.
        in_dtype: element type of q, k, v and of raw gates.
        state_dtype: element type of the state pool.
        out_dtype: element type of the output.
        gate_mode: ``raw`` (gates in ``in_dtype``) or ``ready`` (in fp32).
        pending: accepted tokens of the pending chain that every request carries.
        family: name of the recurrence family.
    """

    batch: int
    nodes: int
    hk: int
    hv: int
    dk: int = 128
    dv: int = 128
    in_dtype: str = "bf16"
    state_dtype: str = "fp32"
    out_dtype: str = "bf16"
    gate_mode: str = "raw"
    pending: int = 0
    family: str = "gdn"

    @property
    def state_bytes(self) -> int:
        """Bytes of one layer's states, all requests."""
        return self.batch * self.hv * self.dk * self.dv * _size(self.state_dtype)

    @property
    def gate_bytes_per_node(self) -> int:
        """Bytes of the gate inputs of one node."""
        return self._values(self.gate_mode) * (_size(self.in_dtype) if self.gate_mode == "raw" else 4)

    def _values(self, mode: str) -> int:
        """Gates of one node."""
        sizes = (self.hk, self.hv), (self.dk, self.dv)
        return sum(math.prod(i.sizes(*sizes)) for i in get_family(self.family).node_gates(mode))

    @property
    def drawn_gate_bytes_per_node(self) -> int:
        """Bytes of the gates of one node in every mode."""
        modes = get_family(self.family).modes
        return sum(self._values(m) * (4 if m == "ready" else _size(self.in_dtype)) for m in modes)

    @property
    def kept_bytes_per_node(self) -> int:
        """Bytes of the gates that factors keep of one node: ready ones in fp32, or those of the call."""
        return 4 * self._values("ready") if get_family(self.family).keeps_ready else self.gate_bytes_per_node

    @property
    def factor_bytes_per_node(self) -> int:
        """Bytes of one node's state factors when captured: k, v as given, and gates."""
        return (self.hk * self.dk + self.hv * self.dv) * _size(self.in_dtype) + self.kept_bytes_per_node

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of a state snapshot for every node, what a serial tree kernel writes."""
        return self.nodes * self.state_bytes


@dataclass(frozen=True)
class Traffic:
    """Bytes by purpose, and multiply-adds counted as two operations."""

    state_read: int
    state_written: int
    inputs: int
    outputs: int
    factors: int
    flops: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.state_read + self.state_written + self.inputs + self.outputs + self.factors

    def floor_us(self, bandwidth_gbs: float) -> float:
        """Microseconds at ``bandwidth_gbs`` (1e9 bytes a second, reads plus writes)."""
        return floor_us(self.total, bandwidth_gbs)


def floor_us(nbytes: int, bandwidth_gbs: float) -> float:
    """Microseconds that ``nbytes`` take at ``bandwidth_gbs`` (1e9 bytes a second).

    Raises:
        ValueError: the bandwidth is not positive.
    """
    if bandwidth_gbs <= 0:
        raise ValueError(f"bandwidth must be positive, got {bandwidth_gbs}")
    return nbytes / bandwidth_gbs * 1e-3


def verify_traffic(work: Workload, captured: bool = False) -> Traffic:
    """Bytes and operations of one verify.

    State read once, q, k, v and gates read once, output written once, and the factors written once if ``captured``.
    Operations: the two products with the state, both Gram matrices (a key head each), the solve and the readout; of an
    additive family one product with the state, one Gram matrix and the readout.
    """
    w, n, size = work, work.nodes, _size(work.in_dtype)
    tokens = w.batch * n
    per_node = (2 * w.hk * w.dk + w.hv * w.dv) * size + w.gate_bytes_per_node
    # A pending token has no output and no query, only k, v and gates.
    pending = w.batch * w.pending * ((w.hk * w.dk + w.hv * w.dv) * size + w.gate_bytes_per_node)
    spec = get_family(w.family)
    constants = sum(math.prod(i.sizes((w.hk, w.hv), (w.dk, w.dv))) for i in spec.parameters(w.gate_mode)) * 4
    m = n + w.pending
    # Rows that are erased from meet the state, the keys and the pseudo-values.
    erased = m if spec.erase != "none" else 0
    flops = (
        2 * w.batch * w.hv * (erased + n) * w.dk * w.dv
        + 2 * w.batch * w.hk * (erased * m + n * m) * w.dk
        + 2 * w.batch * w.hv * (erased * m // 2 + n * m) * w.dv
    )
    return Traffic(
        state_read=w.state_bytes,
        state_written=0,
        inputs=tokens * per_node + pending + constants,
        outputs=tokens * w.hv * w.dv * _size(w.out_dtype),
        factors=tokens * w.factor_bytes_per_node if captured else 0,
        flops=flops,
    )


def commit_traffic(work: Workload, accepted: int | Sequence[int], captured: bool = False) -> Traffic:
    """Bytes and operations of one commit of one layer.

    Args:
        work: the call that was verified.
        accepted: accepted tokens of every request, or one number for all. A request with none is not touched.
        captured: factors hold ready fp32 gates rather than the call's own.
    """
    counts = [accepted] * work.batch if isinstance(accepted, int) else list(accepted)
    if len(counts) != work.batch:
        raise ValueError(f"accepted has {len(counts)} entries for a batch of {work.batch}")
    live = [c for c in counts if c > 0]
    tokens = sum(c + work.pending for c in live)
    state = work.state_bytes // max(1, work.batch) * len(live)
    gates = work.kept_bytes_per_node if captured else work.gate_bytes_per_node
    per_node = (work.hk * work.dk + work.hv * work.dv) * _size(work.in_dtype) + gates
    return Traffic(
        state_read=state,
        state_written=state,
        inputs=tokens * per_node,
        outputs=0,
        factors=0,
        flops=(6 if get_family(work.family).erase != "none" else 4) * tokens * work.hv * work.dk * work.dv,
    )
