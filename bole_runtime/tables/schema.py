"""What a table file may contain. Tables are data from others: every field has a type and a bound.

This module imports msgspec, so nothing imports it until a table is read or written.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from bole_runtime.kernels.conv_problem import CONV_OPS, CONV_TABLE, MAX_CHANNELS, ConvProblem
from bole_runtime.kernels.problem import (
    DEPTH_BUCKETS,
    NODE_BUCKETS,
    PENDING_BUCKETS,
    SMALL,
    Problem,
    Specialisation,
    work_bucket,
)

#: Raised by one whenever a reader of the previous version would misread a file.
SCHEMA_VERSION = 1
#: A table larger than this is refused unread.
MAX_FILE_BYTES = 16 << 20
#: Entries beyond this are refused.
MAX_ENTRIES = 20_000

Word = Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9_]{0,63}\Z")]
GpuKey = Annotated[str, Meta(pattern=r"\A[a-z0-9][a-z0-9-]{0,63}\Z")]
Param = Annotated[str, Meta(pattern=r"\A[A-Za-z][A-Za-z0-9_]{0,63}\Z")]
KernelName = Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9_]{0,199}\Z")]
Hash = Annotated[str, Meta(pattern=r"\A[0-9a-f]{8,64}\Z")]
Line = Annotated[str, Meta(max_length=400, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
Version = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z.+_-]{0,64}\Z")]
Dim = Annotated[int, Meta(ge=1, le=4096)]
Channels = Annotated[int, Meta(ge=1, le=MAX_CHANNELS)]
Work = Annotated[int, Meta(ge=1, le=1 << 40)]
Micros = Annotated[float, Meta(ge=0.0, le=1e9)]
Ratio = Annotated[float, Meta(ge=0.0, le=1e9)]
SmallInt = Annotated[int, Meta(ge=-(1 << 31), le=1 << 31)]
Word64 = Annotated[str, Meta(max_length=64)]
#: Tile parameters as a file holds them. Names and values are checked against the variant's declaration afterwards.
ParamValue = bool | SmallInt | Word64
DType = Literal["bf16", "fp16", "fp32"]
Batch = Annotated[int, Meta(ge=1, le=1 << 20)]
#: Name of a tree shape, or branching factors a level.
Shape = Annotated[str, Meta(pattern=r"\A[a-z0-9,]{1,64}\Z")]


class KernelRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kernel of an entry: its readable name and the hash of its comment-stripped text."""

    name: KernelName
    text_hash: Hash


class RunnerUp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The second best configuration, kept so that a reviewer sees how clear the choice was."""

    variant: Word
    params: Annotated[dict[Param, ParamValue], Meta(max_length=32)]
    median_us: Micros


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The chosen configuration of one bucket and what was seen of it.

    The first fields are the key, those of ``Problem.key()``. Times are microseconds a layer.

    Attributes:
        median_us: median of the replays (``measured``) or the model's estimate (``predicted``).
        spread_us: distance between the quartiles of the replays, 0 when predicted.
        floor_us: time to move the necessary bytes at the copy bandwidth of the same run.
        ratio: ``median_us / floor_us``.
        error: relative Frobenius error against the fp64 reference, None when nothing ran.
        default_us: the analytic default in the same run, None when it cannot run.
        margin: how much slower the runner-up is, as a fraction.
        label: ``measured`` on the GPU of the file or ``predicted`` without it.
        transferred_from: key of the searched bucket whose best few were re-timed here; None when searched itself.
        trials: configurations tried.
        triton: Triton version, where it differs from the file's.
        date: day of the measurement, where it differs from the file's.
        hk: key heads of the launch that was timed. A bucket has many launches: of 12 heads and of 16, say. Of this and
            the next three, all are None in entries that were written before they said so.
        hv: its value heads.
        batch: its requests.
        shape: shape of its trees.
    """

    op: Literal["verify", "commit"]
    family: Word
    dk: Dim
    dv: Dim
    group: Dim
    in_dtype: DType
    state_dtype: DType
    gate_mode: Word
    precision: Literal["fast", "lossless"]
    nodes: Dim
    depth: Dim
    pending: Annotated[int, Meta(ge=0, le=4096)]
    work: Work
    variant: Word
    params: Annotated[dict[Param, ParamValue], Meta(max_length=32)]
    median_us: Micros
    spread_us: Micros
    floor_us: Micros
    ratio: Ratio
    error: Ratio | None
    default_us: Micros | None
    runner_up: RunnerUp | None
    margin: Ratio | None
    kernels: Annotated[list[KernelRef], Meta(max_length=16)]
    label: Literal["measured", "predicted"]
    transferred_from: Line | None = None
    trials: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    triton: Version | None = None
    date: Annotated[str, Meta(pattern=r"\A\d{4}-\d{2}-\d{2}\Z")] | None = None
    hk: Dim | None = None
    hv: Dim | None = None
    batch: Batch | None = None
    shape: Shape | None = None

    def problem(self) -> Problem:
        """Return the problem that this entry was made for."""
        return Problem(
            op=self.op,
            family=self.family,
            dk=self.dk,
            dv=self.dv,
            group=self.group,
            in_dtype=self.in_dtype,
            state_dtype=self.state_dtype,
            gate_mode=self.gate_mode,
            precision=self.precision,
            nodes=self.nodes,
            depth=self.depth,
            pending=self.pending,
            work=self.work,
        )

    def key(self) -> str:
        """Return the table key."""
        return self.problem().key()


class ConvEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The chosen configuration of one bucket of a convolution. The first fields are the key, of ``ConvProblem``.

    Attributes:
        timed_channels: channels of the launch that was timed, at most the bucket's.
        batch: its requests, None in entries that were written before they said so.
        shape: shape of its trees, None as ``batch``.

    The others are those of :class:`Entry`.
    """

    op: Literal["tree_conv", "conv_commit"]
    channels: Channels
    width: Annotated[int, Meta(ge=2, le=8)]
    length: Annotated[int, Meta(ge=1, le=16)]
    in_dtype: DType
    state_dtype: DType
    bias: bool
    silu: bool
    dynamic: bool
    nodes: Dim
    pending: Annotated[int, Meta(ge=0, le=4096)]
    work: Work
    variant: Word
    params: Annotated[dict[Param, ParamValue], Meta(max_length=32)]
    timed_channels: Channels
    median_us: Micros
    spread_us: Micros
    floor_us: Micros
    ratio: Ratio
    error: Ratio | None
    default_us: Micros | None
    runner_up: RunnerUp | None
    margin: Ratio | None
    kernels: Annotated[list[KernelRef], Meta(max_length=16)]
    label: Literal["measured", "predicted"]
    transferred_from: Line | None = None
    trials: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    triton: Version | None = None
    date: Annotated[str, Meta(pattern=r"\A\d{4}-\d{2}-\d{2}\Z")] | None = None
    batch: Batch | None = None
    shape: Shape | None = None

    @property
    def family(self) -> str:
        """Name of the table that it is in, where an entry of a recurrence names its family."""
        return CONV_TABLE

    def problem(self) -> ConvProblem:
        """Return the problem that this entry was made for."""
        return ConvProblem(**{f: getattr(self, f) for f in ConvProblem.__dataclass_fields__})

    def key(self) -> str:
        """Return the table key."""
        return self.problem().key()


AnyEntry = Entry | ConvEntry


def launch_of(entry: AnyEntry) -> dict[str, int | str] | None:
    """Return the launch that an entry was timed with, None where the entry does not say it."""
    names = ("timed_channels", "batch", "shape") if isinstance(entry, ConvEntry) else ("hk", "hv", "batch", "shape")
    found = {name: getattr(entry, name) for name in names}
    return None if None in found.values() else found


def entry_type(op: str) -> type[Entry] | type[ConvEntry]:
    """Return the schema of the entries of an operation."""
    return ConvEntry if op in CONV_OPS else Entry


def new_entry(problem: Specialisation, **values: Any) -> AnyEntry:
    """Return the entry of a problem, with values beside the key."""
    kind = entry_type(problem.op)
    key = {f: getattr(problem, f) for f in kind.__struct_fields__ if f not in values and hasattr(problem, f)}
    return kind(**key, **values)


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The device and the software that a file was made with. Empty strings where nothing ran."""

    key: GpuKey
    device_name: Line
    compute_capability: tuple[Annotated[int, Meta(ge=0, le=99)], Annotated[int, Meta(ge=0, le=99)]]
    driver: Version
    cuda: Version
    triton: Version
    torch: Version
    ptxas: Version
    clocks: Line


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything of a file except its entries."""

    schema_version: Annotated[int, Meta(ge=1, le=1_000_000)]
    family: Word
    gpu: Gpu
    protocol: Line
    date: Annotated[str, Meta(pattern=r"\A\d{4}-\d{2}-\d{2}\Z")]


class TableFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One ``<gpu>/<family>.json``. Convolutions have a table of their own, whose ``family`` is ``conv``."""

    schema_version: Annotated[int, Meta(ge=1, le=1_000_000)]
    family: Word
    gpu: Gpu
    protocol: Line
    date: Annotated[str, Meta(pattern=r"\A\d{4}-\d{2}-\d{2}\Z")]
    entries: list[AnyEntry]

    def header(self) -> Header:
        """Return the file without its entries."""
        return Header(
            schema_version=self.schema_version, family=self.family, gpu=self.gpu, protocol=self.protocol, date=self.date
        )

    def triton_of(self, entry: AnyEntry) -> str:
        """Return the Triton version that ``entry`` was made with."""
        return entry.triton or self.gpu.triton


def bucket_reason(entry: AnyEntry) -> str | None:
    """Return why the key of an entry names no bucket, or None."""
    # The smallest rows of a verification, of which neither number is a bucket alone.
    small = entry.op == "verify" and (entry.nodes, entry.pending) == (SMALL, SMALL)
    for name, buckets in (("nodes", NODE_BUCKETS), ("depth", DEPTH_BUCKETS), ("pending", PENDING_BUCKETS)):
        value = getattr(entry, name, None)
        if value is not None and value not in buckets and not (small and name != "depth"):
            return f"{name} = {value} is not one of {buckets}"
    for name in ("work", "channels"):
        value = int(getattr(entry, name, 1))
        if value & (value - 1):
            return f"{name} = {value} is not a power of two"
    if isinstance(entry, ConvEntry) and entry.length < entry.width - 1:
        return f"a state of length {entry.length} is too short for a width of {entry.width}"
    return _launch_reason(entry)


def _launch_reason(entry: AnyEntry) -> str | None:
    """Return why the launch of an entry is none of its bucket, or None."""
    if isinstance(entry, ConvEntry):
        said, heads = {"batch": entry.batch, "shape": entry.shape}, 1
    else:
        said = {"hk": entry.hk, "hv": entry.hv, "batch": entry.batch, "shape": entry.shape}
        heads = entry.hv or 1
        if entry.hk is not None and entry.hv is not None and entry.hv != entry.hk * entry.group:
            return f"hk = {entry.hk} and hv = {entry.hv} are not of HV/HK = {entry.group}"
    missing = [name for name, value in said.items() if value is None]
    if missing:
        return None if len(missing) == len(said) else f"a launch has {', '.join(said)}; {', '.join(missing)} is missing"
    if work_bucket(entry.batch or 1, heads) != entry.work:
        return f"a launch of batch = {entry.batch} is not of work = {entry.work}"
    return None
