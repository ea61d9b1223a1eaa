"""What an evaluation can end in."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Kinds of failure, in the order that reports list them; each reads after a number.
KINDS: dict[str, str] = {
    "compile": "did not compile",
    "slow": "took too long to compile",
    "resources": "needed more shared memory or registers than there are",
    "spills": "spilled registers",
    "wrong": "gave wrong numbers",
    "nan": "left NaN or unwritten elements",
    "bounds": "wrote outside their output",
    "races": "differed from run to run",
    "crash": "crashed their process",
    "killed": "had their process killed",
    "illegal": "made an illegal memory access",
    "hang": "ran past their time limit",
    "busy": "waited too long for the device or their inputs",
    "error": "raised an error",
}
#: Kinds that say something about the kernel itself, wherever it runs on such a GPU: kept on the known-bad list.
BAD_KINDS = ("wrong", "nan", "bounds", "races", "crash", "illegal", "hang")
#: Kinds that say nothing about the candidate, which has not run: never kept, so that the next run tries it again.
PASSING_KINDS = ("busy",)


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
