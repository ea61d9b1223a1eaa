"""What a search does for verifications and recurrent commits; see ``kinds.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bole_runtime.kernels.arguments import captured_names
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, Variant
from bole_runtime.tables.command import geometry

if TYPE_CHECKING:
    from bole_codegen.measure import Traffic
    from bole_codegen.search.bucket_inputs import BucketInputs
    from bole_codegen.search.case import CheckCase
    from bole_codegen.search.results import KernelResources
    from bole_codegen.search.roofline import KernelCost
    from bole_codegen.search.targets import Target

#: Fields that a good configuration may depend on.
_NEAR = ("dk", "dv", "group", "in_dtype", "state_dtype", "gate_mode", "precision", "nodes", "pending")


class Recurrence:
    """Implements :class:`~bole_codegen.search.kinds.Kind`, whose documentation it shares."""

    protocols: Mapping[str, str] = {
        "measured": (
            "CUDA graph of layers with tensors of their own, states over 3x L2, factors captured, "
            "median of interleaved replays"
        ),
        "predicted": "compiled without the GPU, ranked by a roofline model",
    }

    def class_of(self, problem: Problem) -> Problem:
        """Buckets that differ only in work and depth have the same kernels."""
        return problem.replace(work=1, depth=problem.nodes)

    def target_of(self, problem: Problem, timed: Mapping[str, Any]) -> Target:
        """See :class:`Kind`; without more, heads of a usual model."""
        from bole_codegen.search.targets import USUAL_SHAPE, Target

        hk, hv, batch = (timed[n] for n in ("hk", "hv", "batch")) if "hk" in timed else geometry(problem)
        return Target(problem, hk, hv, batch, timed.get("shape", USUAL_SHAPE))

    def shared(self, target: Target) -> Target:
        """The precision profile changes kernels, not inputs."""
        return replace(target, problem=target.problem.replace(precision="fast"))

    def values(self, target: Target) -> dict[str, Any]:
        """See :class:`Kind`."""
        from bole_codegen.measure.trees import shape_name

        return {"hk": target.hk, "hv": target.hv, "batch": target.batch, "shape": shape_name(target.shape)}

    def check(self, problem: Problem, device: Any, seed: int) -> CheckCase:
        """See :class:`Kind`."""
        from bole_codegen.search.case import CheckCase

        return CheckCase(problem, device, seed)

    def layer_count(self, target: Target, l2_bytes: int, memory: int) -> int:
        """See :class:`Kind`."""
        from bole_codegen.search.bucket_inputs import layer_count

        return layer_count(target, l2_bytes, memory)

    def open(self, target: Target, layers: int, seed: int, device: Any) -> BucketInputs:
        """See :class:`Kind`."""
        from bole_codegen.search.bucket_inputs import open_bucket

        return open_bucket(target, layers, seed, device)

    def captured(self, problem: Problem) -> frozenset[str]:
        """See :class:`Kind`."""
        return captured_names(problem)

    def scalars(self, problem: Problem, config: Config, wide: bool) -> Mapping[str, int]:
        """None: what is usual holds for every launch."""
        del problem, config, wide
        return {}

    def widens(self, problem: Problem) -> bool:
        """See :class:`Kind`."""
        return problem.op == "verify" and problem.in_dtype != "fp32"

    def traffic(self, target: Target) -> Traffic:
        """See :class:`Kind`."""
        from bole_codegen.search.roofline import recurrence_traffic

        return recurrence_traffic(target)

    def costs(self, target: Target, config: Config, variant: Variant) -> list[KernelCost]:
        """See :class:`Kind`."""
        from bole_codegen.search.roofline import kernel_costs

        return kernel_costs(target, config, variant)

    def modelled_layers(self, target: Target) -> int:
        """One, though a commit launches all: its states are large."""
        del target
        return 1

    def guess(self, problem: Problem, config: Config) -> KernelResources:
        """See :class:`Kind`."""
        from bole_codegen.search.roofline import guess

        return guess(problem, config)

    def distance(self, problem: Problem, other: Problem) -> int:
        """See :class:`Kind`."""
        return sum(getattr(problem, f) != getattr(other, f) for f in _NEAR)

    def brief(self, problem: Problem) -> str:
        """Operation and profile."""
        return f"{problem.op} {problem.precision}"

    def group(self, problem: Problem) -> str:
        """See :class:`Kind`."""
        return f"{problem.op} {problem.family} {problem.precision} n{problem.nodes}"

    def title(self, problem: Problem) -> str:
        """See :class:`Kind`."""
        p = problem
        pending = f" p{p.pending}" if p.pending else ""
        return f"{p.op} {p.dk}x{p.dv} g{p.group} s{p.state_dtype} {p.precision} n{p.nodes}{pending} w{p.work}"

    def bucket_name(self, problem: Problem) -> str:
        """See :class:`Kind`."""
        p = problem
        pending = f" p{p.pending}" if p.pending else ""
        return (
            f"{p.op} {p.family} {p.dk}x{p.dv} g{p.group} {p.in_dtype}/{p.state_dtype} {p.gate_mode} {p.precision} "
            f"n{p.nodes}{pending} w{p.work}"
        )
