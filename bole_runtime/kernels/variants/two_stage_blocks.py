"""Two kernels a verification of many nodes: R by blocks of rows, then one pass over the state, rows block by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bole_runtime.kernels.arguments import verify_arguments
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, GpuLimits, KernelPlan, Param, Variant
from bole_runtime.kernels.variants import common as c
from bole_runtime.kernels.variants.precision import check_precision
from bole_runtime.kernels.variants.two_stage import CHAIN, PREPARE_WARPS, SHARE, check_launches

# Of 64 rows, the first kernel spills, and ptxas 12.8 gets descriptors of its solve wrong.
ROW_BLOCK = Param("row_block", (16, 32), "rows of R a program of the first kernel makes")
BLOCK = Param("block", (16, 32, 64), "rows of the pass over the state that are under way at a time")
PARAMS = (c.BV, BLOCK, c.STATE_DOT, c.MIX, c.SOLVE, c.WARPS, ROW_BLOCK, PREPARE_WARPS, SHARE, c.PDL, CHAIN)

#: Up to here, all of R in one program, or in one tile of the pass over the state, takes less.
MIN_ROWS = 128


def _applies(problem: Problem) -> str | None:
    if c.tile_rows(problem) < MIN_ROWS:
        return f"{c.tile_rows(problem)} rows are no more than a tile of other variants"
    return c.check_usual(problem)


def _check(problem: Problem, config: Config, gpu: GpuLimits) -> str | None:
    if reason := check_precision(problem, config):
        return reason
    if config["bv"] > c.power_of_two(problem.dv):
        return f"bv={config['bv']} is wider than dv={problem.dv}"
    if config["prepare_warps"] * 16 > config["row_block"] * 4:
        return f"prepare_warps={config['prepare_warps']} have no work on {config['row_block']} rows"
    if config["share"] and not 2 <= problem.group <= 4:
        return f"{problem.group} value heads a key head do not share a program"
    threads, dk = 32 * config["warps"], c.power_of_two(problem.dk)
    if config["bv"] < 16:
        return "a value tile needs at least 16 columns"
    if config["bv"] * dk > 128 * threads:
        return "the state block does not fit the registers of its warps"
    if config["block"] * (2 * config["bv"] + dk) > 128 * threads:
        return "the rows under way do not fit the registers of the warps"
    return check_launches(config, gpu)


def _default(problem: Problem, gpu: GpuLimits) -> Config:
    dk = c.power_of_two(problem.dk)
    bv = max(16, min(64, c.power_of_two(problem.dv), 64 * 128 // dk))
    hopper = gpu.compute_capability >= (9, 0)
    return TWO_STAGE_BLOCKS.config(
        {
            "bv": bv,
            # Fast, 129 nodes and 64 requests on an H200: 439 us of the pass, 599 with 32. Lossless spills with 64.
            "block": 64 if problem.precision == "fast" and dk <= 128 else 32,
            "state_dot": c.state_dots(problem.in_dtype, problem.state_dtype, problem.precision)[0],
            "mix": c.mixes(problem.precision)[0],
            "solve": c.solves(problem.precision)[0],
            "warps": max(4, bv * dk // 4096),
            "row_block": 32,
            "prepare_warps": 2,
            "share": False,
            "pdl": hopper,
            "chain": hopper,
        }
    )


def _heads(problem: Problem, config: Config) -> int:
    return problem.group if config["share"] else 1


def _plans(problem: Problem, config: Config) -> tuple[KernelPlan, ...]:
    rows = c.tile_rows(problem)
    first = c.context(
        problem,
        {
            "ROWS": (rows, "pending tokens and nodes of a request"),
            "C": (config["row_block"], "rows of a block"),
            "LEVELS": c.solve_levels(config["row_block"]),
        },
        TRIANGLE=max(1, config["block"] // config["row_block"]),
        HEADS=_heads(problem, config),
        MIX_STORE="fp32",
        PDL=config["pdl"],
        CHAIN=config["chain"],
        MAKES_R=True,
        EXACT_NORMS=c.exact_norms(problem),
        **c.solve_context(problem, config),
        spec_line=c.spec_line(problem, state=False),
        config_line=" ".join(f"{n}={config[n]}" for n in ("solve", "row_block", "block", "share", "pdl", "chain")),
    )
    second = c.context(
        problem,
        {
            "ROWS": (rows, "pending tokens and nodes of a request"),
            "C": (config["block"], "rows of a block"),
            "BV": (config["bv"], "value columns of a program"),
        },
        ORIENT="nodes",
        STATE_DOT=config["state_dot"],
        MIX=config["mix"],
        PDL=config["pdl"],
        CHAIN=config["chain"],
        config_line=" ".join(f"{n}={config[n]}" for n in ("bv", "block", "state_dot", "mix", "pdl", "chain")),
    )
    arguments = verify_arguments(problem)
    return (
        KernelPlan(
            "verify_prepare_blocks.py.jinja",
            c.stem(problem, "verify_prepare_blocks", state=False),
            first,
            config["prepare_warps"],
            1,
            arguments,
            c.SCRATCH,
            pdl=config["chain"],
        ),
        KernelPlan(
            "verify_readout_blocks.py.jinja",
            c.stem(problem, "verify_readout_blocks"),
            second,
            config["warps"],
            1,
            arguments,
            c.SCRATCH,
            pdl=config["pdl"],
        ),
    )


def _grids(problem: Problem, config: Config, batch: int, heads: int) -> tuple[tuple[int, ...], ...]:
    blocks = c.tile_rows(problem) // config["row_block"]
    return (
        (batch * heads // _heads(problem, config), blocks),
        (batch * heads, -(-problem.dv // config["bv"])),
    )


def _workspace(problem: Problem, config: Config, batch: int, heads: int) -> tuple[int, int]:
    rows, shared = c.tile_rows(problem), _heads(problem, config)
    programs = batch * heads // shared * (rows // config["row_block"])
    columns = -(-problem.dv // config["bv"]) * config["bv"]
    weights = batch * heads * c.weights(problem) * rows + programs * (5 * shared + 3) * rows
    return batch * heads * rows * (rows + columns), weights


def _narrow(problem: Problem, gpu: GpuLimits) -> Mapping[str, Callable[[Any], bool]]:
    return {**c.narrow(problem, gpu), "bv": lambda v: 16 <= v <= c.power_of_two(problem.dv)}


TWO_STAGE_BLOCKS = Variant(
    name="two_stage_blocks",
    op="verify",
    doc="two kernels for many nodes: R by blocks of rows; then one pass over the state, rows block by block",
    params=PARAMS,
    applies=_applies,
    check=_check,
    default=_default,
    plans=_plans,
    grids=_grids,
    workspace=_workspace,
    narrow=_narrow,
    # Of 32 rows; at the ends of its loops.
    spills=256,
    starts=({"block": 64}, {"block": 32}, {"row_block": 16, "prepare_warps": 1}, {"bv": 32}),
)
