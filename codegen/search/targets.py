"""The buckets of a run, and how they share kernels.

Buckets that differ only in ``work`` and ``depth`` have the same kernels: they form a class. A candidate of a class is
compiled and checked once and timed in many buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bole_codegen.search.kinds import kind_of
from bole_runtime.kernels.problem import (
    DEPTH_BUCKETS,
    NODE_BUCKETS,
    PENDING_BUCKETS,
    Problem,
    Specialisation,
    bucket,
    row_buckets,
    work_bucket,
)

#: Batch sizes of the benchmark grid.
BATCHES: tuple[int, ...] = (1, 4, 8, 16, 32, 64, 128, 256)
#: Head counts and dims a table can hold.
MAX_SIZE = 4096
#: Requests of one launch; more would only take memory to time.
MAX_BATCH = 65536
#: Tree shape of a launch unless it is told.
USUAL_SHAPE = "ragged"
#: Characters of the name of a shape, which entries hold.
MAX_SHAPE = 64


@dataclass(frozen=True)
class Geometry:
    """Heads of one model on one GPU."""

    hk: int
    hv: int
    dk: int
    dv: int
    name: str = ""

    def __post_init__(self) -> None:
        for field in ("hk", "hv", "dk", "dv"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
            if getattr(self, field) > MAX_SIZE:
                raise ValueError(f"{field} = {getattr(self, field)} is above the largest supported value, {MAX_SIZE}")
        if self.hv % self.hk:
            raise ValueError(f"value heads must be a multiple of key heads, got HK = {self.hk} and HV = {self.hv}")


@dataclass(frozen=True)
class Target:
    """One bucket and the launch that stands for it in measurements.

    Attributes:
        problem: the bucket.
        hk: key heads of the launch; 1 of a convolution.
        hv: value heads of the launch; of a convolution its channels, which ``Variant.grids`` takes in their place.
        batch: requests of the launch; ``B * HV``, of a convolution ``B``, falls into ``problem.work``.
        shape: tree shape of the launch.
    """

    problem: Specialisation
    hk: int
    hv: int
    batch: int
    shape: str = USUAL_SHAPE

    @property
    def kernels(self) -> Specialisation:
        """The class: the problem without what does not change its kernels."""
        return class_of(self.problem)


def class_of(problem: Specialisation) -> Specialisation:
    """Return the representative of all problems with the kernels of ``problem``."""
    return kind_of(problem).class_of(problem)


def make_targets(
    geometries: Sequence[Geometry],
    *,
    ops: Iterable[str],
    families: Iterable[str],
    in_dtypes: Iterable[str],
    state_dtypes: Iterable[str],
    gate_modes: Iterable[str],
    precisions: Iterable[str],
    nodes: Iterable[int],
    batches: Iterable[int],
    pendings: Iterable[int],
    depths: Iterable[int] = (),
    shape: str = "ragged",
) -> tuple[Target, ...]:
    """Return one target a bucket, in a fixed order; launches that fall into the same bucket are merged.

    Args:
        depths: largest numbers of strict ancestors; empty means as deep as a tree of so many nodes can be.

    Raises:
        ValueError: a size is above the largest bucket or below its minimum, or the shape is unknown.
    """
    lists = [list(x) for x in (ops, families, in_dtypes, state_dtypes, gate_modes, precisions)]
    node_list, pending_list, batch_list = _capacities(nodes, pendings, batches, shape)
    depth_list = [bucket(_least(d, 1, "depth"), DEPTH_BUCKETS, "depth") for d in depths]
    # Here, not above: workers read targets, and need not import torch for that.
    from bole_runtime.families import get_family

    found: dict[Problem, Target] = {}
    for op, family, in_dtype, state_dtype, asked, precision in _product(*lists):
        # Captured factors, which a server commits, hold ready gates where those are one value a head.
        gate_mode = "ready" if op == "commit" and get_family(family).keeps_ready else asked
        for g in geometries:
            pairs = {row_buckets(str(op), n, p) for n, p in _product(node_list, pending_list)}
            for n, pending in sorted(pairs):
                for depth in sorted(set(depth_list)) or [bucket(n, DEPTH_BUCKETS, "depth")]:
                    for b in batch_list:
                        problem = Problem(
                            op=op,
                            family=family,
                            dk=g.dk,
                            dv=g.dv,
                            group=g.hv // g.hk,
                            in_dtype=in_dtype,
                            state_dtype=state_dtype,
                            gate_mode=gate_mode,
                            precision=precision,
                            nodes=n,
                            depth=depth,
                            pending=pending,
                            work=work_bucket(b, g.hv),
                        )
                        found.setdefault(problem, Target(problem, g.hk, g.hv, b, shape))
    return tuple(found.values())


def sizes(
    nodes: Iterable[int], pendings: Iterable[int], batches: Iterable[int], shape: str
) -> tuple[list[int], list[int], list[int]]:
    """Return node and pending buckets and batch sizes, each once, in order.

    Raises:
        ValueError: a size is above the largest bucket or below its minimum, or the shape is unknown.
    """
    node_list, pending_list, batch_list = _capacities(nodes, pendings, batches, shape)
    node_list = sorted({bucket(n, NODE_BUCKETS, "nodes") for n in node_list})
    return node_list, sorted({bucket(p, PENDING_BUCKETS, "pending") for p in pending_list}), batch_list


def _capacities(
    nodes: Iterable[int], pendings: Iterable[int], batches: Iterable[int], shape: str
) -> tuple[list[int], list[int], list[int]]:
    """Return the same as they are given, each once, in order."""
    node_list = sorted({_least(n, 1, "nodes") for n in nodes})
    pending_list = sorted({_least(p, 0, "pending") for p in pendings})
    batch_list = sorted({_least(b, 1, "batch") for b in batches})
    if batch_list and batch_list[-1] > MAX_BATCH:
        raise ValueError(f"batch = {batch_list[-1]} is above the largest supported value, {MAX_BATCH}")
    check_shape(shape)
    return node_list, pending_list, batch_list


def check_shape(shape: str) -> None:
    """Refuse a tree shape that cannot be made.

    Raises:
        ValueError: it is unknown, or its name is too long for an entry.
    """
    from bole_codegen.measure.trees import make_parents, shape_name

    make_parents(shape, 1, 1)
    if len(shape_name(shape)) > MAX_SHAPE:
        raise ValueError(f"shape {shape!r} is longer than the {MAX_SHAPE} characters that a table holds")


def _least(value: int, least: int, name: str) -> int:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def _product(*lists: Sequence[object]) -> list[tuple]:  # type: ignore[type-arg]
    from itertools import product

    return list(product(*lists))


def classes(targets: Sequence[Target]) -> dict[Specialisation, tuple[Target, ...]]:
    """Group targets by the kernels they share, keeping the order; within a class by depth, then work."""
    found: dict[Specialisation, list[Target]] = {}
    for target in targets:
        found.setdefault(target.kernels, []).append(target)
    return {k: tuple(sorted(v, key=lambda t: (t.problem.depth, t.problem.work))) for k, v in found.items()}


def anchors(members: Sequence[Target], count: int) -> tuple[Target, ...]:
    """Return the members that are searched: evenly spread over the work buckets, both ends first.

    Args:
        members: the targets of a class, in order of work.
        count: at most this many.
    """
    if count < 1:
        raise ValueError(f"at least one bucket of a class must be searched, got {count}")
    if count >= len(members):
        return tuple(members)
    if count == 1:
        return (members[len(members) // 2],)
    last = len(members) - 1
    places = sorted({round(i * last / (count - 1)) for i in range(count)})
    return tuple(members[i] for i in places)


def nearest_anchor(target: Target, searched: Sequence[Target]) -> Target:
    """Return the searched target whose work is nearest by ratio, the larger one on a tie."""

    def distance(other: Target) -> tuple[float, int]:
        a, b = sorted((target.problem.work, other.problem.work))
        return b / a, -other.problem.work

    return min(searched, key=distance)
