"""What tables do differently for recurrences and for convolutions. Light to import: a lookup needs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bole_runtime.kernels.conv_problem import CONV_OPS, ConvProblem
from bole_runtime.kernels.problem import OPS, SMALL, Problem, Specialisation
from bole_runtime.tables.command import conv_command, recurrence_command

#: Kind of warning and what it says.
Note = tuple[str, str]


@dataclass(frozen=True)
class Kind:
    """One kind of problem. Problems of a kind are of one class, which its functions know.

    Attributes:
        name: put before kinds of warnings, so that each kind of problem has its own once a process; may be empty.
        class_fields: fields of a problem that shape its kernels: what a known-bad kernel is listed under.
        rank: how far an entry's problem is from a call's (smaller is nearer), None when it never stands in.
        notes: what to warn about when an entry stands in.
        command: problem and GPU key to the command that searches its bucket.
    """

    name: str
    class_fields: tuple[str, ...]
    rank: Callable[[Any, Any], tuple[float, ...] | None]
    notes: Callable[[Any, Any], Iterator[Note]]
    command: Callable[[Any, str], str]


def _nearest_work(problem: Specialisation, other: Specialisation) -> tuple[float, float]:
    """Return the rank of a work bucket: the nearest upward, or the largest one below when none is above."""
    below = other.work < problem.work
    return below, -other.work if below else other.work


def _holds(problem: Problem, other: Problem) -> bool:
    """Whether an entry's tile holds the rows of a call, and is no larger than it need be where that halves it.

    What is good for 32 rows is not for the 16 of up to 8 nodes and 8 tokens. What is good for 16 nodes alone is nearer.
    """
    rows = other.nodes, other.pending
    if problem.nodes == problem.pending == SMALL:
        return rows in ((SMALL, SMALL), (2 * SMALL, 0))
    return other.nodes >= problem.nodes and other.pending >= problem.pending


def _rank(problem: Problem, other: Problem) -> tuple[float, ...] | None:
    same = ("op", "family", "dk", "dv", "in_dtype", "state_dtype", "precision")
    if any(getattr(problem, f) != getattr(other, f) for f in same):
        return None
    if not _holds(problem, other) or other.depth < problem.depth:
        return None
    return (
        other.nodes,
        other.pending,
        other.gate_mode != problem.gate_mode,
        abs(math.log2(other.group / problem.group)),
        *_nearest_work(problem, other),
        # Last: an entry for deeper trees serves these as well, one for another batch can be far from the best.
        other.depth,
    )


def _notes(problem: Problem, other: Problem) -> Iterator[Note]:
    # A commit's tiles do not depend on how its gates come: only what is captured is tuned.
    if other.gate_mode != problem.gate_mode and problem.op != "commit":
        yield "gates", f"{problem.key()} takes the entry of {other.gate_mode!r} gates"
    if other.group != problem.group:
        yield "group", f"{problem.key()} takes the entry of HV/HK = {other.group}"


#: What shapes a kernel of a convolution, yet hardly which tiles are best.
_SWITCHES = ("length", "bias", "silu")


def _rank_conv(problem: ConvProblem, other: ConvProblem) -> tuple[float, ...] | None:
    same = ("op", "width", "in_dtype", "state_dtype", "dynamic")
    if any(getattr(problem, f) != getattr(other, f) for f in same):
        return None
    if other.nodes < problem.nodes or other.pending < problem.pending:
        return None
    narrower = other.channels < problem.channels
    return (
        other.nodes,
        other.pending,
        sum(getattr(problem, f) != getattr(other, f) for f in _SWITCHES),
        abs(math.log2(other.channels / problem.channels)),
        narrower,
        *_nearest_work(problem, other),
    )


def _notes_conv(problem: ConvProblem, other: ConvProblem) -> Iterator[Note]:
    if any(getattr(problem, f) != getattr(other, f) for f in ("channels", *_SWITCHES)):
        yield "shape", f"{problem.key()} takes the entry of {other.key()}"


RECURRENCE = Kind(
    name="",
    class_fields=(
        "op", "family", "dk", "dv", "group", "in_dtype", "state_dtype", "gate_mode", "precision", "nodes", "pending",
    ),
    rank=_rank,
    notes=_notes,
    command=recurrence_command,
)  # fmt: skip
CONVOLUTION = Kind(
    name="convolution ",
    class_fields=(
        "op", "width", "length", "in_dtype", "state_dtype", "bias", "silu", "dynamic", "pending",
    ),
    rank=_rank_conv,
    notes=_notes_conv,
    command=conv_command,
)  # fmt: skip

_BY_OP = {**dict.fromkeys(OPS, RECURRENCE), **dict.fromkeys(CONV_OPS, CONVOLUTION)}


def kind_of(problem: Specialisation) -> Kind:
    """Return the kind of a problem."""
    return _BY_OP[problem.op]


def class_of(problem: Specialisation) -> tuple[object, ...]:
    """Return the values of the fields that shape the kernels of a problem."""
    text = problem.for_text()
    return tuple(getattr(text, f) for f in kind_of(problem).class_fields)


def tune_command(problem: Specialisation, gpu: str) -> str:
    """Return the exact command that searches the bucket of ``problem`` on ``gpu``."""
    return kind_of(problem).command(problem, gpu)
