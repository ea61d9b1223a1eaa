"""What the benchmark asks of a peer: another project's kernel, prepared on the same inputs and timed in the same run.

A peer never ships with Bole. It is found at a path the user gives, and one that cannot be loaded is listed with the
reason instead of being left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from bole_codegen.measure import VerifyInputs, Workload


class PeerUnavailable(RuntimeError):
    """A peer cannot be loaded or cannot serve anything here; the message is the reason shown to the user."""


@dataclass(frozen=True)
class PeerOptions:
    """Paths and switches from the command line, and the family whose kernel is asked for."""

    sglang: str | None = None
    family: str = "gdn"


class PreparedPeer(Protocol):
    """A peer bound to one benchmark point."""

    #: Device bytes beyond inputs and outputs: snapshots, scratch.
    workspace_bytes: int

    def make_layer(self, index: int) -> Callable[[], object]:
        """Return a callable that enqueues layer ``index`` and nothing else; it may be captured in a CUDA graph."""

    def output(self, index: int) -> Tensor:
        """Return the tensor ``[B, N, HV, dv]`` that the latest launch of layer ``index`` wrote, as a view.

        After a capture it is the graph's own tensor: poison it, replay, and look again.
        """

    def poison(self) -> None:
        """Fill scratch that the kernel must write before it reads, so that a stale value shows."""


class Peer(Protocol):
    """A kernel of another project.

    Attributes:
        name: as given to ``--peers``; also the column's name.
        version: release and a hash of what was loaded.
        profile: the Bole profile whose error it is comparable with, ``fast`` or ``lossless``.
    """

    name: str
    version: str
    profile: str

    def refuses(self, work: Workload) -> str | None:
        """Return why this peer cannot serve a point, or None."""

    def memory_bytes(self, work: Workload) -> int:
        """Return device bytes needed beyond the inputs, so that a point that does not fit is listed, not run."""

    def prepare(self, inputs: VerifyInputs, shape: str, scratch_budget: int) -> PreparedPeer:
        """Bind to inputs. ``scratch_budget`` is what may be allocated to keep scratch out of L2."""


Loader = Callable[[PeerOptions], Any]
