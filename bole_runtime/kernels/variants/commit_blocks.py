"""Commit of all layers in one launch, a few tokens at a time: one wait for their rows, and for their products."""

from __future__ import annotations

from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, GpuLimits, KernelPlan, Param, Variant
from bole_runtime.kernels.variants import common as c
from bole_runtime.kernels.variants.commit import grids, layer_plans, no_workspace

BLOCK = Param("block", (2, 4, 8), "tokens of the accepted path applied at a time")
PARAMS = (c.BV, BLOCK, c.WARPS)


def _check(problem: Problem, config: Config, gpu: GpuLimits) -> str | None:
    del gpu
    if config["bv"] > c.power_of_two(problem.dv):
        return f"bv={config['bv']} is wider than dv={problem.dv}"
    keys, threads = c.power_of_two(problem.dk), 32 * config["warps"]
    each = config["bv"] * keys // threads
    if not 4 <= each <= 128:
        return f"{each} elements of the state a thread are too few or too many"
    rows = config["block"] * (2 * -(-keys // threads) + -(-config["bv"] // 32))
    if each + rows > 208:
        return f"{config['block']} tokens beside {each} elements of the state do not fit the registers of a thread"
    return None


def _default(problem: Problem, gpu: GpuLimits) -> Config:
    del gpu
    bv = max(8, min(c.power_of_two(problem.dv), 64 * 128 // c.power_of_two(problem.dk)))
    warps = max(1, min(4, bv * c.power_of_two(problem.dk) // 1024))
    return COMMIT_BLOCKS.config({"bv": bv, "block": 4, "warps": warps})


def _plans(problem: Problem, config: Config) -> tuple[KernelPlan, ...]:
    width = min(c.power_of_two(problem.dk), 128 // c.dtype_bytes(problem.state_dtype))
    sizes = {"WIDTH": (width, "key dims of a row in one line of memory")}
    more = {"BLOCK": config["block"], "SPLIT_KEYS": True}
    return layer_plans("commit_blocks.py.jinja", "commit_blocks", problem, config, sizes, **more)


COMMIT_BLOCKS = Variant(
    name="blocks",
    op="commit",
    doc="the recurrence unrolled over a few tokens of the accepted path in fp32, state rewritten in place",
    params=PARAMS,
    applies=c.check_plain,
    check=_check,
    default=_default,
    plans=_plans,
    grids=grids,
    workspace=no_workspace,
)
