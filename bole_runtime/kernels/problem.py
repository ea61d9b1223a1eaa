"""What a kernel is specialised for, apart from its tile parameters.

A :class:`Problem` holds host-side facts only (geometry, dtypes, capacities), never device data, so the
choice of a kernel stays valid for every replay of a captured CUDA graph.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol, cast

#: Node capacities a table has entries for. A tree of N nodes uses the nearest bucket upward.
NODE_BUCKETS: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
#: Capacities of the pending chain (accepted tokens that are not yet in the state).
PENDING_BUCKETS: tuple[int, ...] = (0, 16, 32, 64)
#: Largest number of strict ancestors of a node.
DEPTH_BUCKETS: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512)
#: Short names of the element types a kernel reads and writes.
DTYPES: tuple[str, ...] = ("bf16", "fp16", "fp32")
OPS: tuple[str, ...] = ("verify", "commit")
#: Nodes, and pending tokens above them, that share the 16 rows of the smallest tile: see :func:`row_buckets`.
SMALL = 8
PRECISIONS: tuple[str, ...] = ("fast", "lossless")


def bucket(value: int, buckets: tuple[int, ...], name: str) -> int:
    """Return the nearest bucket at or above ``value``.

    Raises:
        ValueError: ``value`` is above the largest bucket.
    """
    for b in buckets:
        if value <= b:
            return b
    raise ValueError(f"{name} = {value} is above the largest supported value, {buckets[-1]}")


def row_buckets(op: str, nodes: int, pending: int) -> tuple[int, int]:
    """Return the node and pending buckets of a call's capacities.

    Up to 8 nodes above a chain of up to 8 tokens are verified in a tile of 16 rows, not of 32. Both are buckets only
    together: without a chain 16 rows hold 16 nodes, and a longer one needs 32 rows anyway. A commit goes by tokens,
    whose number it reads on the device.

    Raises:
        ValueError: one is above the largest bucket.
    """
    if op == "verify" and nodes <= SMALL and 0 < pending <= SMALL:
        return SMALL, SMALL
    return bucket(nodes, NODE_BUCKETS, "nodes"), bucket(pending, PENDING_BUCKETS, "pending capacity")


def work_bucket(batch: int, value_heads: int) -> int:
    """Return B * HV rounded up to a power of two (the unit of parallel work of a launch)."""
    work = max(1, batch * value_heads)
    return 1 << (work - 1).bit_length()


class Specialisation(Protocol):
    """What variants, loader and renderer know of any kind of problem. Hashable: choices are remembered."""

    def __hash__(self) -> int: ...

    @property
    def op(self) -> str:
        """Operation: what the variants are looked up under."""

    @property
    def in_dtype(self) -> str:
        """Element type of the inputs."""

    @property
    def state_dtype(self) -> str:
        """Element type of the state pool."""

    @property
    def nodes(self) -> int:
        """Node bucket."""

    @property
    def depth(self) -> int:
        """Depth bucket."""

    @property
    def pending(self) -> int:
        """Pending-chain bucket."""

    @property
    def work(self) -> int:
        """Bucket of the parallel work of a launch, a power of two."""

    @property
    def table(self) -> str:
        """Name of the table that holds entries for it."""

    def key(self) -> str:
        """Return the table key: every field that an entry is stored under, in a fixed order."""

    def for_text(self) -> Specialisation:
        """Return the problem without what only chooses among kernels: equal ones have the same kernels."""

    def describe(self, kernel: str) -> str:
        """Return one line for people about a kernel, which the template names."""

    def replace(self, **changes: object) -> Specialisation:
        """Return a copy with some fields changed."""


@dataclass(frozen=True, order=True)
class Problem:
    """One specialisation of a verification or a recurrent commit.

    Attributes:
        op: ``verify`` or ``commit``.
        family: name of a registered recurrence family, e.g. ``gdn``.
        dk: key head dimension.
        dv: value head dimension.
        group: value heads a key head, HV // HK.
        in_dtype: element type of q, k and v (``bf16``, ``fp16``, ``fp32``).
        state_dtype: element type of the state pool.
        gate_mode: ``ready`` (g, beta) or ``raw`` (the model's own gate inputs).
        precision: ``fast`` or ``lossless``.
        nodes: node bucket; for a commit, the node bucket of the tree that was verified.
        depth: depth bucket.
        pending: pending-chain bucket, 0 when there is no pending chain.
        work: bucket of B * HV, a power of two.
        qk_l2norm: whether q and k are l2-normalised inside the kernel; default, as the family does. Not part of the
            table key: entries are of the family's way.
        gate_dtypes: element types of the gate inputs in the order of the family's spec, for kernels that read
            pointers from a table; empty means the usual ones. Not part of the table key.
    """

    op: str
    family: str
    dk: int
    dv: int
    group: int
    in_dtype: str
    state_dtype: str
    gate_mode: str
    precision: str
    nodes: int
    depth: int
    pending: int
    work: int
    qk_l2norm: bool = cast("bool", None)
    gate_dtypes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Fill in what the family does, where it is known: a table may name one that is not."""
        if cast("bool | None", self.qk_l2norm) is None:
            from bole_runtime.families import FAMILIES

            spec = FAMILIES.get(self.family)
            object.__setattr__(self, "qk_l2norm", spec is None or spec.qk_l2norm)

    @property
    def table(self) -> str:
        """Name of the table that holds entries for it: one a family."""
        return self.family

    def key(self) -> str:
        """Return the table key: every field that an entry is stored under, in a fixed order."""
        return (
            f"{self.op}/{self.family}/dk{self.dk}-dv{self.dv}-g{self.group}/{self.in_dtype}-s{self.state_dtype}"
            f"/{self.gate_mode}/{self.precision}/n{self.nodes}-d{self.depth}-p{self.pending}-w{self.work}"
        )

    def for_text(self) -> Problem:
        """Return the problem without what only chooses among kernels; see :class:`Specialisation`."""
        return self.replace(work=1, depth=self.nodes)

    def describe(self, kernel: str) -> str:
        """Return one line for people about a kernel."""
        from bole_runtime.families import get_family

        return f"{get_family(self.family).title}: {kernel}, {self.precision}."

    def replace(self, **changes: object) -> Problem:
        """Return a copy with some fields changed; another family brings its own normalisation, unless that is given."""
        if "family" in changes:
            changes.setdefault("qk_l2norm", None)
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
