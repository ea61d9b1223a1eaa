"""What an evaluation can end in."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Kinds of failure, in the order that reports list them.
KINDS: dict[str, str] = {
    "compile": "does not compile",
    "resources": "needs more shared memory or registers than there are",
    "spills": "spills registers",
    "wrong": "wrong numbers",
    "nan": "NaN or an element not written",
    "bounds": "writes outside its output",
    "races": "differs from run to run",
    "crash": "killed its process",
    "illegal": "illegal memory access",
    "hang": "ran past its time limit",
    "error": "raised an error",
}


class CandidateError(Exception):
    """A candidate failed. Raised in a worker, recorded by the parent.

    Args:
        kind: a key of :data:`KINDS`.
        message: what happened, one line.
        fatal: whether the process that raised it must not be used again (a poisoned device context).
    """

    def __init__(self, kind: str, message: str, fatal: bool = False) -> None:
        super().__init__(kind, message, fatal)
        self.kind = kind
        self.message = message
        self.fatal = fatal

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True)
class Failed:
    """A candidate that does not count, and why."""

    kind: str
    message: str


@dataclass(frozen=True)
class KernelResources:
    """What one compiled kernel takes."""

    shared_bytes: int
    registers: int
    spill_bytes: int


@dataclass(frozen=True)
class Screened:
    """A candidate that compiles and, where a device is present, agrees with the reference.

    Attributes:
        error: relative error against the fp64 reference; None when nothing ran.
        resources: of each kernel, when they are known.
        seconds: wall time of the screening, compilation included.
    """

    error: float | None
    resources: tuple[KernelResources, ...] = field(default=())
    seconds: float = 0.0


@dataclass(frozen=True)
class Timed:
    """Microseconds a layer: measured, or predicted by the model."""

    median_us: float
    spread_us: float
    layers: int = 0


Screening = Screened | Failed
Measurement = Timed | Failed
