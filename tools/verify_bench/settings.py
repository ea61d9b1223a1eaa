"""Settings of a run, error bounds, and how a failure becomes a line in the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from peers import Peer
from torch import Tensor

from bole_codegen.measure import relative_error
from bole_runtime.kernels.space import Config

#: For peers that round every node's state to a 16-bit dtype.
NARROW_STATE_BOUND = 3e-2
#: Rounding of an element type in Frobenius norm is measured on the reference; this is its allowance on top.
MARGIN = 1.1


class DeviceLost(RuntimeError):
    """A kernel broke the CUDA context: nothing more can run in this process."""


@dataclass
class Settings:
    """What to run at every point."""

    profiles: Sequence[str] = ("fast", "lossless")
    pinned: Sequence[Config] = ()
    tuned: bool = True
    peers: Sequence[Peer] = ()
    peer_nodes: Sequence[int] | None = None
    replays: int = 20
    layers: int | None = None
    accepted: int = 4
    commit: bool = True
    stages: bool = False
    eager: bool = False
    timing: bool = True
    device: str = "cuda"
    bandwidth_gbs: float | None = None
    log: Callable[[str], None] = field(default=lambda text: None)


def is_fatal(error: BaseException | None) -> bool:
    while error is not None:
        text = str(error).lower()
        if "illegal" in text or "device-side assert" in text or "misaligned" in text or "unspecified launch" in text:
            return True
        error = error.__cause__
    return False


def reason_of(error: BaseException) -> str:
    if is_fatal(error):
        raise DeviceLost(f"{type(error).__name__}: {error}") from error
    lines = str(error).strip().splitlines() or [""]
    return f"failed: {type(error).__name__}: {lines[0][:300]}"


def synchronize(settings: Settings) -> None:
    if settings.device == "cuda":
        torch.cuda.synchronize()


def allowed_error(bound: float, references: dict[int, Tensor], dtype: torch.dtype) -> float:
    """Return ``bound`` plus the rounding of ``dtype`` itself, measured on the reference."""
    rounding = max(relative_error(ref.to(dtype), ref) for ref in references.values())
    return MARGIN * math.hypot(bound, rounding)
