"""What a search does differently for recurrences and for convolutions, behind one interface.

Processes that only compile read this too: what needs torch is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from bole_codegen.search.convolution import Convolution
from bole_codegen.search.recurrence import Recurrence
from bole_runtime.kernels.conv_problem import CONV_OPS
from bole_runtime.kernels.problem import OPS, Specialisation
from bole_runtime.kernels.space import Config, Variant

if TYPE_CHECKING:
    from bole_codegen.measure import Traffic
    from bole_codegen.search.results import KernelResources
    from bole_codegen.search.roofline import KernelCost
    from bole_codegen.search.targets import Target

#: Operations that can be searched.
SEARCHED_OPS: tuple[str, ...] = (*OPS, *CONV_OPS)


class Check(Protocol):
    """One small launch with its fp64 result. Each method raises ``CandidateError``."""

    def run(self, config: Config | None) -> float:
        """Check every form of launch; return the relative error."""

    def gate(self, config: Config | None) -> float:
        """Check the launch that is timed; return the relative error."""

    def launch(self, config: Config | None, full: bool) -> object:
        """Launch once, for what comes of it; ``full`` as for :meth:`run`, else as for :meth:`gate`."""


class Bucket(Protocol):
    """Inputs of one bucket at full size."""

    def launches(self, config: Config) -> tuple[Callable[[int], Callable[[], object]], int, int]:
        """Return what makes a graph node, how many nodes there are, and how many layers each holds."""

    def floor_bytes(self) -> int:
        """Return the fewest bytes of a layer."""

    def spot_check(self, config: Config) -> float:
        """Check some requests of the launch that is timed; raises ``CandidateError``."""

    def serving(self, target: Target) -> Bucket:
        """Return these inputs for another target that shares them, see :meth:`Kind.shared`."""


class Kind(Protocol):
    """One kind of problem.

    Attributes:
        protocols: how times are made, by label; a change of it makes earlier evaluations void.
    """

    @property
    def protocols(self) -> Mapping[str, str]:
        """How times are made, by label."""

    def class_of(self, problem: Any) -> Specialisation:
        """Return the representative of all problems that a search tells apart by time alone."""

    def target_of(self, problem: Any, timed: Mapping[str, Any]) -> Target:
        """Return a launch that falls into a bucket: that of ``timed``, which is as :meth:`values` or lacks some."""

    def shared(self, target: Target) -> Target:
        """Return the target that stands for all with the same inputs."""

    def values(self, target: Target) -> dict[str, Any]:
        """Return what an entry holds of the launch, beside key and times: all that tells the target again."""

    def check(self, problem: Any, device: Any, seed: int) -> Check:
        """Draw the check of a class."""

    def layer_count(self, target: Target, l2_bytes: int, memory: int) -> int:
        """Return how many layers a bucket gets. Raises ``CandidateError`` when not even one fits."""

    def open(self, target: Target, layers: int, seed: int, device: Any) -> Bucket:
        """Draw the inputs of a bucket."""

    def captured(self, problem: Any) -> frozenset[str]:
        """Return the names of the buffers that a timed launch captures factors in."""

    def scalars(self, problem: Any, config: Config, wide: bool) -> Mapping[str, int]:
        """Return arguments whose values Triton compiles into a kernel, by name: those of a launch that is timed, or
        ``wide``, of a full check."""

    def widens(self, problem: Any) -> bool:
        """Return whether a full check has an output of another type than a timed launch."""

    def traffic(self, target: Target) -> Traffic:
        """Return the fewest bytes of a typical layer."""

    def costs(self, target: Target, config: Config, variant: Variant) -> list[KernelCost]:
        """Return what every kernel of a launch moves and computes, for the roofline model."""

    def modelled_layers(self, target: Target) -> int:
        """Return the layers of the launch that :meth:`costs` is of."""

    def guess(self, problem: Any, config: Config) -> KernelResources:
        """Return what a kernel probably takes, before it is compiled."""

    def distance(self, problem: Any, other: Any) -> int:
        """Return in how many fields two problems differ that a good configuration may depend on."""

    def brief(self, problem: Any) -> str:
        """Return what results are grouped by."""

    def group(self, problem: Any) -> str:
        """Return the name of a class."""

    def title(self, problem: Any) -> str:
        """Return a short name of a bucket, for a small figure."""

    def bucket_name(self, problem: Any) -> str:
        """Return the part of a key that people tell buckets apart by."""


_RECURRENCE: Kind = Recurrence()
_CONVOLUTION: Kind = Convolution()
_BY_OP: Mapping[str, Kind] = {**dict.fromkeys(OPS, _RECURRENCE), **dict.fromkeys(CONV_OPS, _CONVOLUTION)}


def kind_of(problem: Specialisation) -> Kind:
    """Return the kind of a problem."""
    return kind_of_op(problem.op)


def kind_of_op(op: str) -> Kind:
    """Return the kind of the problems of an operation."""
    return _BY_OP[op]


def order(problem: Specialisation) -> tuple[str, Any]:
    """Return what problems are sorted by: those of one operation compare with each other."""
    return problem.op, problem
