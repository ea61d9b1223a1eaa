"""Many nodes of families with a decay a key channel or erase rows of their own, in three kernels: sums of gates,
products of pairs of row blocks, then one pass over the state that solves block by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bole_runtime.kernels.arguments import verify_arguments
from bole_runtime.kernels.gates import gate_layout
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, GpuLimits, KernelPlan, Param, Variant
from bole_runtime.kernels.variants import chunked, two_stage_slices
from bole_runtime.kernels.variants import common as c
from bole_runtime.kernels.variants.precision import check_precision
from bole_runtime.kernels.variants.slices import MAX_ROWS as MAX_ERASE_ROWS
from bole_runtime.kernels.variants.slices import WIDEST
from bole_runtime.kernels.variants.two_stage import PREPARE_WARPS
from bole_runtime.kernels.variants.two_stage_slices import PREPARE_STAGES, STATE_DOT

ROW_BLOCK = Param("row_block", (16, 32), "rows of a block, in all kernels")
SLICE = Param("slice", (16, 32, 64), "key channels the second kernel works on at a time")
SUM_SLICE = Param("sum_slice", (16, 32, 64, 128), "key channels of a program of the first kernel")
SUM_WARPS = Param("sum_warps", (1, 2, 4), "warps of the first kernel")
PARAMS = (
    c.BV,
    ROW_BLOCK,
    SLICE,
    SUM_SLICE,
    STATE_DOT,
    c.MIX,
    c.SOLVE,
    c.WARPS,
    PREPARE_WARPS,
    PREPARE_STAGES,
    SUM_WARPS,
    c.PDL,
)

#: Values a row that the first two kernels hand on: see templates/pair_blocks.jinja.
ROW_VALUES = 14


def _applies(problem: Problem) -> str | None:
    gates, rows = gate_layout(problem.family, problem.gate_mode), c.tile_rows(problem)
    if gates.plain and not gates.decay_per_channel:
        return f"family {problem.family!r} has one decay a head, which other variants take at less cost"
    if not gates.decay or gates.decay_per_head:
        return f"family {problem.family!r} has no decay a node, which this variant takes"
    if rows <= (two_stage_slices.MAX_ROWS if gates.plain else MAX_ERASE_ROWS):
        return f"{rows} rows are no more than a tile of other variants"
    return c.supports_family(problem)


def dots(problem: Problem) -> tuple[str, ...]:
    """Return the values of ``state_dot`` that keep the profile, best first."""
    return two_stage_slices.dots(problem) if c.plain(problem) else c.row_dots(problem)


def _check(problem: Problem, config: Config, gpu: GpuLimits) -> str | None:
    reason = check_precision(problem, config, dots=dots(problem), mixes=chunked.mixes(problem))
    if reason:
        return reason
    dk, rows = c.power_of_two(problem.dk), config["row_block"]
    if config["bv"] > c.power_of_two(problem.dv):
        return f"bv={config['bv']} is wider than dv={problem.dv}"
    if config["bv"] < 16:
        return "a value tile needs at least 16 columns"
    for name in ("slice", "sum_slice"):
        if config[name] > dk:
            return f"{name}={config[name]} is wider than dk={problem.dk}"
    if config["prepare_stages"] > 1 and config["slice"] >= dk:
        return "one slice is no loop to pipeline"
    if config["prepare_warps"] * 16 > rows * 4:
        return f"prepare_warps={config['prepare_warps']} have no work on {rows} rows"
    if rows * config["slice"] > 16 * 32 * config["prepare_warps"]:
        return "rows of a slice do not fit the registers of the second kernel"
    if rows * config["sum_slice"] > 32 * 32 * config["sum_warps"]:
        return "rows of a slice do not fit the registers of the first kernel"
    threads = 32 * config["warps"]
    if config["bv"] * dk > 128 * threads:
        return "the state block does not fit the registers of its warps"
    if rows * (2 * config["bv"] + dk) > 128 * threads:
        return "the rows under way do not fit the registers of the warps"
    return "programmatic launches need compute capability 9.0" if config["pdl"] and not _hopper(gpu) else None


def _hopper(gpu: GpuLimits) -> bool:
    return gpu.compute_capability >= (9, 0)


def _default(problem: Problem, gpu: GpuLimits) -> Config:
    dk = c.power_of_two(problem.dk)
    bv = max(16, min(64, c.power_of_two(problem.dv), 64 * 128 // dk))
    gates = gate_layout(problem.family, problem.gate_mode)
    # Of 32 rows, kernels of updates of rank two spill, and so does a pass over the state with fp32 rows in three terms.
    few = bool(gates.erase_write) or (not gates.plain and problem.precision != "fast")
    return THREE_STAGE_BLOCKS.config(
        {
            "bv": bv,
            "row_block": 16 if few else 32,
            "slice": 16 if few else min(32, dk),
            "sum_slice": min(64, dk),
            "state_dot": dots(problem)[0],
            "mix": chunked.mixes(problem)[0],
            "solve": c.solves(problem.precision)[0],
            "warps": max(4, bv * dk // 4096),
            "prepare_warps": 1 if few else 4,
            "prepare_stages": 1,
            "sum_warps": 2 if few else 4,
            "pdl": _hopper(gpu),
        }
    )


def _row_type(config: Config) -> str:
    return {"bf16": "bf16", "bf16x4": "bf16x2"}.get(config["state_dot"], "fp32")


def _record(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Return fp32 elements of a head: its pairs of blocks, its sums of gates, and its decayed rows."""
    rows, block, dk = c.tile_rows(problem), config["row_block"], c.power_of_two(problem.dk)
    gates = gate_layout(problem.family, problem.gate_mode)
    blocks = rows // block
    matrices = 4 if gates.erase_write else 2 if gates.erases else 1
    refined = c.solve_context(problem, config).get("REFINED", False)
    pairs = (matrices * (blocks * (blocks + 1) // 2) + (blocks if refined else 0)) * block * block
    sums = 2 * rows * dk if gates.decay_per_channel else 0
    return pairs, sums, 2 * rows * dk // (2 if _row_type(config) == "bf16" else 1)


def _plans(problem: Problem, config: Config) -> tuple[KernelPlan, ...]:
    rows, block = c.tile_rows(problem), config["row_block"]
    pairs, sums, decayed = _record(problem, config)
    common: dict[str, tuple[Any, str]] = {
        "ROWS": (rows, "pending tokens and nodes of a request"),
        "C": (block, "rows of a block"),
        "BLOCKS": (rows // block, "blocks"),
        "PAIRS": (pairs, "elements of the pairs of blocks of a head"),
        "SUMS": (sums, "elements of its sums of gates, behind them"),
        "RECORD": (pairs + sums + decayed, "elements of both and, behind them, its decayed rows"),
    }

    def plan(template: str, stem: str, warps: int, extra: dict[str, tuple[Any, str]], **more: Any) -> KernelPlan:
        ctx = c.context(
            problem,
            {**common, **extra},
            ROW_TYPE=_row_type(config),
            PDL=config["pdl"],
            EXACT_NORMS=c.exact_norms(problem),
            **c.solve_context(problem, config),
            **more,
        )
        scratch = (template, stem, ctx, warps, 1, verify_arguments(problem), c.SCRATCH)
        return KernelPlan(*scratch, pdl=config["pdl"] and template != "verify_sums.py.jinja")

    def line(*names: str) -> str:
        return " ".join(f"{name}={config[name]}" for name in names)

    state = {"spec_line": c.spec_line(problem, state=False)}
    return (
        plan(
            "verify_sums.py.jinja",
            c.stem(problem, "verify_sums", state=False),
            config["sum_warps"],
            {"BK": (config["sum_slice"], "key channels of a program")},
            config_line=line("row_block", "sum_slice", "state_dot", "pdl"),
            **state,
        ),
        plan(
            "verify_pairs.py.jinja",
            c.stem(problem, "verify_pairs", state=False),
            config["prepare_warps"],
            {
                "BK": (config["slice"], "key dims read at a time"),
                "STAGES": (config["prepare_stages"], "slices under way at a time"),
                "LEVELS": c.solve_levels(block),
                "WIDEST": (WIDEST, "range of a channel's sums of gates whose exponentials, of either sign, fp32 holds"),
            },
            MAKES_R=True,
            config_line=line("row_block", "slice", "prepare_stages", "solve", "state_dot", "pdl"),
            **state,
        ),
        plan(
            "verify_readout_pairs.py.jinja",
            c.stem(problem, "verify_readout_pairs"),
            config["warps"],
            {"BV": (config["bv"], "value columns of a program")},
            ORIENT="nodes",
            STATE_DOT=config["state_dot"],
            MIX=config["mix"],
            config_line=line("bv", "row_block", "state_dot", "mix", "solve", "pdl"),
        ),
    )


def _grids(problem: Problem, config: Config, batch: int, heads: int) -> tuple[tuple[int, ...], ...]:
    blocks = c.tile_rows(problem) // config["row_block"]
    slices = -(-problem.dk // config["sum_slice"]) if c.channels(problem) else 1
    return (
        (batch * heads, slices),
        (batch * heads, blocks * (blocks + 1) // 2),
        (batch * heads, -(-problem.dv // config["bv"])),
    )


def _workspace(problem: Problem, config: Config, batch: int, heads: int) -> tuple[int, int]:
    rows, tiles = c.tile_rows(problem), -(-problem.dv // config["bv"])
    values = 2 if gate_layout(problem.family, problem.gate_mode).erase_write else 1
    each = sum(_record(problem, config)) + values * tiles * rows * config["bv"]
    return batch * heads * each, batch * heads * ROW_VALUES * rows


def _narrow(problem: Problem, gpu: GpuLimits) -> Mapping[str, Callable[[Any], bool]]:
    dk = c.power_of_two(problem.dk)
    return {
        **c.narrow(problem, gpu),
        "bv": lambda v: 16 <= v <= c.power_of_two(problem.dv),
        "state_dot": lambda v: v in dots(problem),
        "mix": lambda v: v in chunked.mixes(problem),
        "slice": lambda v: v <= dk,
        "sum_slice": lambda v: v <= dk,
    }


THREE_STAGE_BLOCKS = Variant(
    name="three_stage_blocks",
    op="verify",
    doc="three kernels for many nodes of a decay a key channel or erase rows of their own: by pairs of row blocks",
    params=PARAMS,
    applies=_applies,
    check=_check,
    default=_default,
    plans=_plans,
    grids=_grids,
    workspace=_workspace,
    narrow=_narrow,
    # In the pass for strong gates.
    spills=256,
    starts=(
        {"row_block": 16, "slice": 32, "prepare_warps": 2, "warps": 4},
        {"slice": 16},
        {"prepare_stages": 2},
        {"bv": 32},
        {"sum_slice": 32, "sum_warps": 2},
    ),
)
