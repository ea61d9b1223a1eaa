"""Commit of all layers in one launch, token by token: for the few tokens that a round accepts."""

from __future__ import annotations

from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, GpuLimits, KernelPlan, Param, Variant
from bole_runtime.kernels.variants import common as c
from bole_runtime.kernels.variants.commit import grids, layer_plans, no_workspace

TILES = Param("tiles", (1, 2, 4, 8), "value tiles a program goes through, the next asked for ahead", usual=1)
PARAMS = (c.BV, c.WARPS, TILES)


def _check(problem: Problem, config: Config, gpu: GpuLimits) -> str | None:
    del gpu
    if config["bv"] > c.power_of_two(problem.dv):
        return f"bv={config['bv']} is wider than dv={problem.dv}"
    each = config["bv"] * c.power_of_two(problem.dk) // (32 * config["warps"])
    if not 4 <= each <= 128:
        return f"{each} elements of the state a thread are too few or too many"
    if config["tiles"] > 1:
        if problem.pending:
            return "rows that only append to their chain are taken a tile a program"
        if each > 64:
            return "two tiles of the state do not fit the registers of a thread"
        if each < 32 or config["warps"] > 2:
            return "tiles one after the other are for programs too large to be many at once"
        if config["tiles"] * config["bv"] > c.power_of_two(problem.dv):
            return f"{config['tiles']} tiles of bv={config['bv']} are wider than dv={problem.dv}"
    return None


def _default(problem: Problem, gpu: GpuLimits) -> Config:
    # Measured on an H200: a warp a tile, of 32 columns where there are many heads, 12 % faster than 4 warps for 64.
    dk, dv = c.power_of_two(problem.dk), c.power_of_two(problem.dv)
    if (
        not problem.pending
        and problem.work >= gpu.sms
        and c.erases(problem)
        and c.plain(problem)
        and not c.channels(problem)
    ):
        # Many small tiles in turn, on an H200 at 64 requests: 85.0 -> 79.7 us (fp32 states), 66.4 -> 54.2 (bf16).
        bv = max(8, min(dv // 2, (8 if problem.state_dtype == "fp32" else 16) * 128 // dk))
        made = COMMIT_STEPS.config({"bv": bv, "warps": 1, "tiles": min(8, dv // bv)})
        if _check(problem, made, gpu) is None:
            return made
    # A chain's addresses need registers too.
    columns = 8 if problem.work < gpu.sms else 16 if problem.pending else 32
    bv = max(8, min(dv, columns * 128 // dk))
    return COMMIT_STEPS.config({"bv": bv, "warps": max(1, bv * dk // 4096), "tiles": 1})


def _plans(problem: Problem, config: Config) -> tuple[KernelPlan, ...]:
    return layer_plans("commit_steps.py.jinja", "commit_steps", problem, config, {})


COMMIT_STEPS = Variant(
    name="steps",
    op="commit",
    doc="the recurrence over the accepted path, token by token in fp32, state rewritten in place",
    params=PARAMS,
    applies=c.supports_family,
    check=_check,
    default=_default,
    plans=_plans,
    grids=grids,
    workspace=no_workspace,
    starts=({"bv": 8, "warps": 1, "tiles": 8}, {"bv": 16, "warps": 1, "tiles": 8}, {"bv": 32, "warps": 1, "tiles": 1}),
)
