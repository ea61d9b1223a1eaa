"""What a search does for convolutions along trees and their commits; see ``kinds.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bole_runtime.kernels.conv_problem import ConvProblem
from bole_runtime.kernels.space import Config, Variant

if TYPE_CHECKING:
    from bole_codegen.measure import Traffic
    from bole_codegen.search.conv_case import ConvCase
    from bole_codegen.search.conv_inputs import ConvInputs
    from bole_codegen.search.results import KernelResources
    from bole_codegen.search.roofline import KernelCost
    from bole_codegen.search.targets import Target

#: Fields that a good configuration may depend on.
_NEAR = ("channels", "width", "length", "in_dtype", "state_dtype", "bias", "silu", "dynamic", "nodes", "pending")


def odd_nodes(nodes: int) -> int:
    """Return the nodes of the launch of a check that fills no block of nodes."""
    return nodes - 3 if nodes >= 16 else nodes


class Convolution:
    """Implements :class:`~bole_codegen.search.kinds.Kind`, whose documentation it shares."""

    protocols: Mapping[str, str] = {
        "measured": (
            "CUDA graph of layers with tensors of their own, all over 3x L2, factors captured, "
            "median of interleaved replays"
        ),
        "predicted": "compiled without the GPU, ranked by a roofline model",
    }

    def class_of(self, problem: ConvProblem) -> ConvProblem:
        """Kernels serve any number of channels and nodes, but which configurations are valid depends on them."""
        return problem.replace(work=1)

    def target_of(self, problem: ConvProblem, timed: Mapping[str, Any]) -> Target:
        """See :class:`Kind`; without more, a launch of the bucket's channels."""
        from bole_codegen.search.targets import USUAL_SHAPE, Target

        channels, batch = timed.get("timed_channels", problem.channels), timed.get("batch", problem.work)
        return Target(problem, 1, channels, batch, timed.get("shape", USUAL_SHAPE))

    def shared(self, target: Target) -> Target:
        """Every target has inputs of its own."""
        return target

    def values(self, target: Target) -> dict[str, Any]:
        """See :class:`Kind`."""
        from bole_codegen.measure.trees import shape_name

        return {"timed_channels": target.hv, "batch": target.batch, "shape": shape_name(target.shape)}

    def check(self, problem: ConvProblem, device: Any, seed: int) -> ConvCase:
        """See :class:`Kind`."""
        from bole_codegen.search.conv_case import ConvCase

        return ConvCase(problem, device, seed)

    def layer_count(self, target: Target, l2_bytes: int, memory: int) -> int:
        """See :class:`Kind`."""
        from bole_codegen.search.conv_inputs import conv_layer_count

        return conv_layer_count(target, l2_bytes, memory)

    def open(self, target: Target, layers: int, seed: int, device: Any) -> ConvInputs:
        """See :class:`Kind`."""
        from bole_codegen.search.conv_inputs import open_conv

        return open_conv(target, layers, seed, device)

    def captured(self, problem: ConvProblem) -> frozenset[str]:
        """See :class:`Kind`."""
        return frozenset({"capture_ptr"} if problem.op == "tree_conv" else ())

    def scalars(self, problem: ConvProblem, config: Config, wide: bool) -> Mapping[str, int]:
        """Blocks of nodes: 1, a multiple of 16 and others are kernels of their own."""
        if problem.op != "tree_conv":
            return {}
        blocks = -(-(odd_nodes(problem.nodes) if wide else problem.nodes) // config["nb"])
        return {"node_blocks": 1 if blocks == 1 else 16 if blocks % 16 == 0 else 2}

    def widens(self, problem: ConvProblem) -> bool:
        """See :class:`Kind`."""
        return problem.op == "tree_conv" and problem.in_dtype != "fp32"

    def traffic(self, target: Target) -> Traffic:
        """See :class:`Kind`."""
        from bole_codegen.search.conv_roofline import conv_traffic

        return conv_traffic(target)

    def costs(self, target: Target, config: Config, variant: Variant) -> list[KernelCost]:
        """See :class:`Kind`."""
        from bole_codegen.search.conv_roofline import conv_costs

        return conv_costs(target, config, variant)

    def modelled_layers(self, target: Target) -> int:
        """One, or all of a commit, whose layers are too small for a launch each."""
        from bole_codegen.search.bucket_inputs import COMMIT_LAYERS

        return COMMIT_LAYERS if target.problem.op == "conv_commit" else 1

    def guess(self, problem: ConvProblem, config: Config) -> KernelResources:
        """See :class:`Kind`."""
        from bole_codegen.search.conv_roofline import conv_guess

        return conv_guess(problem, config)

    def distance(self, problem: ConvProblem, other: ConvProblem) -> int:
        """See :class:`Kind`."""
        return sum(getattr(problem, f) != getattr(other, f) for f in _NEAR)

    def brief(self, problem: ConvProblem) -> str:
        """The operation."""
        return problem.op

    def group(self, problem: ConvProblem) -> str:
        """See :class:`Kind`."""
        return f"{problem.op} {problem.channels}x{problem.width} n{problem.nodes}"

    def title(self, problem: ConvProblem) -> str:
        """See :class:`Kind`."""
        pending = f" p{problem.pending}" if problem.pending else ""
        return f"{problem.op} {problem.channels}x{problem.width} n{problem.nodes}{pending} w{problem.work}"

    def bucket_name(self, problem: ConvProblem) -> str:
        """See :class:`Kind`."""
        p = problem
        pending = f" p{p.pending}" if p.pending else ""
        return (
            f"{p.op} {p.channels}x{p.width} l{p.length} {p.in_dtype}/{p.state_dtype} {p.switches} "
            f"n{p.nodes}{pending} w{p.work}"
        )
