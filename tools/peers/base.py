"""What the benchmark asks of a peer: another project's kernel, prepared on the same inputs and timed in the same run.

A peer never ships with Bole. It is found at a path the user gives, and one that cannot be loaded is listed with the
reason instead of being left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from bole_codegen.measure import LayerInputs, VerifyInputs, Workload


class PeerUnavailable(RuntimeError):
    """A peer cannot be loaded or cannot serve anything here; the message is the reason shown to the user."""


class PeerRefuses(PeerUnavailable):
    """A peer cannot serve the inputs of one point, whatever memory there is."""


@dataclass(frozen=True)
class PeerOptions:
    """Paths and switches from the command line, and the family whose kernel is asked for."""

    sglang: str | None = None
    family: str = "gdn"
    weaver: str | None = None
    treewy: str | None = None


@dataclass(frozen=True)
class ChainedInputs(VerifyInputs):
    """Inputs of requests with accepted tokens that are not in the state yet.

    Attributes:
        pending: those tokens, a chain of equal length a request, one entry a layer; their own ``state`` holds nothing.
    """

    pending: tuple[LayerInputs, ...] = ()


class PreparedPeer(Protocol):
    """A peer bound to one benchmark point."""

    #: Device bytes of a layer beyond inputs and outputs: snapshots, rings, scratch.
    workspace_bytes: int
    #: Kernels that one call of a layer enqueues.
    launches: int

    def make_layer(self, index: int) -> Callable[[], object]:
        """Return a callable that enqueues layer ``index`` and nothing else; it may be captured in a CUDA graph."""

    def output(self, index: int) -> Tensor:
        """Return the tensor ``[B, N, HV, dv]`` that the latest launch of layer ``index`` wrote, as a view.

        After a capture it is the graph's own tensor: poison it, replay, and look again.
        """

    def poison(self) -> None:
        """Fill scratch that the kernel must write before it reads, so that a stale value shows."""


class CommittingPeer(PreparedPeer, Protocol):
    """A prepared peer whose commit is a call of its own, for all layers at once."""

    #: Relative error that its committed states may have, before the rounding of the state's own dtype.
    state_bound: float

    def make_commit(self, counts: list[int]) -> Callable[[], object]:
        """Return a callable that folds the pending tokens and ``counts`` nodes of each request into the states.

        It may run many times: whatever it moves on, such as cursors of a ring, ends where it began.
        """

    def committed(self, index: int) -> Tensor:
        """Return the states of layer ``index`` as they are now, ``[B, HV, dv, dk]``."""


class Peer(Protocol):
    """A kernel of another project.

    Attributes:
        name: as given to ``--peers``; also the column's name.
        version: release and a hash of what was loaded.
        profile: the Bole profile whose error it is comparable with, ``fast`` or ``lossless``.
        includes: what one timed call does, in the words of the report.
        commits: whether a call also commits the round before it, so that its like is a verify and a commit.
    """

    name: str
    version: str
    profile: str
    includes: str
    commits: bool

    def refuses(self, work: Workload) -> str | None:
        """Return why this peer cannot serve a point, or None."""

    def memory_bytes(self, work: Workload) -> int:
        """Return device bytes needed beyond the inputs, so that a point that does not fit is listed, not run."""

    def prepare(self, inputs: VerifyInputs, shape: str, scratch_budget: int) -> PreparedPeer:
        """Bind to inputs. ``scratch_budget`` is what may be allocated to keep scratch out of L2."""


Loader = Callable[[PeerOptions], Any]
