"""The analytic default: what runs where no table has an entry."""

from __future__ import annotations

from bole_runtime.kernels.problem import Problem, Specialisation
from bole_runtime.kernels.space import Config, GpuLimits
from bole_runtime.kernels.variants import all_variants, get_variant
from bole_runtime.kernels.variants.common import erases


def default_config(problem: Specialisation, gpu: GpuLimits) -> Config:
    """Return the configuration to run without a measurement.

    Few heads are a matter of latency: one launch. With many heads, R is made better in a kernel of its own, once for
    all value tiles; of many nodes, by blocks of rows, except for few heads, where pseudo-values are solved for instead.
    A commit goes token by token, unless a pending chain is folded with it: then by a solve, where that is exact enough.

    Raises:
        ValueError: no variant can serve the problem, with each one's reason.
    """
    order = _order(problem, gpu) if isinstance(problem, Problem) else [v.name for v in all_variants(problem.op)]
    reasons = []
    for name in order:
        variant = get_variant(problem.op, name)
        reason = variant.applies(problem)
        if reason is None:
            config = variant.default(problem, gpu)
            reason = variant.check(problem, config, gpu)
            if reason is None:
                return config
        reasons.append(f"{name}: {reason}")
    raise ValueError(f"no variant serves {problem.key()}: " + "; ".join(reasons))


def _order(problem: Problem, gpu: GpuLimits) -> list[str]:
    order = [v.name for v in all_variants(problem.op)]
    if problem.op == "verify" and problem.work >= gpu.sms:
        order = ["two_stage", *(n for n in order if n != "two_stage")]
    if problem.op == "verify" and problem.nodes + problem.pending > 128:
        # Measured on an H200, 129 nodes, fast: 113 and 115 us for 32 heads in all, 555 and 241 for 256.
        many = ["two_stage_blocks", "chunked"] if problem.work >= gpu.sms else ["chunked"]
        order = [*many, *(n for n in order if n not in many)]
    if problem.op == "commit" and _by_solve(problem):
        order = ["path", *(n for n in order if n != "path")]
    return order


def _by_solve(problem: Problem) -> bool:
    """Whether a commit folds so many tokens that a solve is the faster way, and exact enough on any keys.

    Measured on an H200 for Gated DeltaNet, 64 requests, 20 tokens: 197 us against 382; 12 token by token take 291. Keys
    that nearly repeat cost a solve 4e-5 with bf16 terms, which is within the bound of `fast` alone. Above 128 key dims
    what a warp solves with does not fit its registers.
    """
    if erases(problem):
        return problem.precision == "fast" and problem.pending >= 16 and problem.dk <= 128
    return problem.pending > 16
