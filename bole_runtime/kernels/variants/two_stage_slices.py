"""A decay a key channel in two kernels: R and decayed rows; then one pass over the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bole_runtime.kernels.arguments import verify_arguments
from bole_runtime.kernels.gates import gate_layout
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, GpuLimits, KernelPlan, Param, Variant
from bole_runtime.kernels.variants import common as c
from bole_runtime.kernels.variants.miscompiled import check_compiler
from bole_runtime.kernels.variants.precision import check_precision
from bole_runtime.kernels.variants.slices import WIDEST
from bole_runtime.kernels.variants.two_stage import (
    CHAIN,
    MIX_STORE,
    PREPARE_WARPS,
    check_launches,
    readout_grid,
    readout_plan,
)

STATE_DOT = Param("state_dot", (*c.STATE_DOT.choices, "bf16x4"), "how decayed rows meet the state", ordered=False)
SLICE = Param("slice", (16, 32, 64, 128), "key channels the first kernel works on at a time")
PREPARE_STAGES = Param("prepare_stages", (1, 2, 3), "slices under way at a time in the first kernel")
HALVES = Param(
    "halves", (False, True), "rows of the first kernel in halves, as those of 64 have to be", ordered=False, usual=False
)
PREPARE_REGISTERS = Param("prepare_registers", (0, 168, 200), "registers a thread of the first kernel; 0: any", usual=0)
PARAMS = (
    c.ORIENT,
    c.BV,
    c.BK,
    STATE_DOT,
    c.MIX,
    c.SOLVE,
    c.WARPS,
    c.STAGES,
    c.PROGRAMS,
    c.PREFETCH,
    SLICE,
    PREPARE_WARPS,
    PREPARE_STAGES,
    MIX_STORE,
    c.PDL,
    CHAIN,
    HALVES,
    PREPARE_REGISTERS,
)

#: R of more rows does not fit a program.
MAX_ROWS = 64
#: More rows are worked on in halves: of 64 at once, what is held spills, and ptxas 12.8 miscompiles their products.
MAX_WHOLE = 32
#: Rows of a product.
MIN_HALF = 16
#: Of halves, exponentials are of the sums as they are: e^60 times rows of up to 1e12 is in fp32.
WIDEST_HALVED = 60.0


def _applies(problem: Problem) -> str | None:
    gates = gate_layout(problem.family, problem.gate_mode)
    if not gates.decay_per_channel:
        return f"family {problem.family!r} has no decay a key channel, and other variants take it at less cost"
    if not gates.plain:
        return f"family {problem.family!r} erases by rows of its own, which this variant does not take"
    if c.tile_rows(problem) > MAX_ROWS:
        return f"R of {c.tile_rows(problem)} rows does not fit a program"
    return c.supports_family(problem)


def dots(problem: Problem) -> tuple[str, ...]:
    """Return the values of ``state_dot`` that keep the profile: decayed rows fit bf16 terms as a state does."""
    if problem.in_dtype != "bf16":
        return c.row_dots(problem)
    return ("bf16" if problem.precision == "fast" else "bf16x4", *c.row_dots(problem))


def _check(problem: Problem, config: Config, gpu: GpuLimits) -> str | None:
    rows = c.tile_rows(problem)
    reason = check_precision(problem, config, whole=True, dots=dots(problem)) or c.check_tile(problem, config)
    if reason:
        return reason
    if config["bk"] != c.power_of_two(problem.dk, 32):
        return "decayed rows are read whole"
    if config["slice"] > c.power_of_two(problem.dk):
        return f"slice={config['slice']} is wider than dk={problem.dk}"
    if reason := _check_halves(rows, config):
        return reason
    if config["prepare_warps"] * 16 > rows * 4:
        return f"prepare_warps={config['prepare_warps']} have no work on {rows} rows"
    if rows * config["slice"] > 128 * 32 * config["prepare_warps"]:
        return "rows of a slice do not fit the registers of the first kernel"
    if config["prepare_stages"] > 1 and config["slice"] >= c.power_of_two(problem.dk):
        return "one slice is no loop to pipeline"
    if config["mix_store"] == "bf16" and (problem.precision != "fast" or config["mix"] != "bf16"):
        return "R in bf16 is for the fast profile and a bf16 product"
    reason = check_launches(config, gpu) or check_compiler(problem, config, narrow=config["programs"] > 0)
    return reason or c.check_blocks(problem, config)


def _check_halves(rows: int, config: Config) -> str | None:
    """Reason why the first kernel cannot work on rows in halves, or not in halves, as a configuration says, or None."""
    if not config["halves"]:
        if rows > MAX_WHOLE:
            return f"{rows} rows at once do not fit the registers of the first kernel"
        return "registers are bounded where rows are in halves" if config["prepare_registers"] else None
    if rows < 2 * MIN_HALF:
        return f"halves of {rows} rows are less than a product takes"
    if config["prepare_warps"] * 32 > rows:
        # Triton 3.6 repeats the rows of products that are chained, and all that is made of them.
        return f"prepare_warps={config['prepare_warps']} would do the same work on halves of {rows} rows"
    if config["slice"] > 32:
        return "halves of rows of a slice do not fit the registers of the first kernel"
    return None


def _default(problem: Problem, gpu: GpuLimits) -> Config:
    rows, dk = c.tile_rows(problem), c.power_of_two(problem.dk, 32)
    bv = min(64, c.power_of_two(problem.dv), 64 * 128 // min(256, dk))
    fast = problem.precision == "fast"
    tiles = problem.work * -(-problem.dv // bv)
    # Of 64 rows, ptxas 12.8 makes the descriptor of a product in the walk depend on the way there.
    programs = 512 if fast and rows <= 32 else 384 if rows == 16 else 0
    walk = 0 < 2 * programs <= tiles and dk <= 256
    # Lossless with 32 rows: with them on the left, fp32 ones spilled, and two bf16 terms have not been timed.
    left = not fast and rows == 32 and bv >= 64
    hopper = gpu.compute_capability >= (9, 0)
    chunk = min({16: 16, 32: 32 if fast else 16, 64: 16}[rows], c.power_of_two(problem.dk))
    return TWO_STAGE_SLICES.config(
        {
            "orient": "state" if left else "nodes",
            "bv": bv,
            "bk": dk,
            "state_dot": dots(problem)[0],
            "mix": c.mixes(problem.precision)[0],
            "solve": c.default_solve(problem),
            "warps": c.default_warps(problem, bv),
            "stages": 1,
            "programs": programs if walk else 0,
            "prefetch": not walk,
            "slice": chunk,
            "prepare_warps": min(rows // 16, 2),
            # Of 64 rows, fast, on an H200 at 64 requests: 281.0 -> 258.1 us (quick timings of a search).
            "prepare_stages": 2 if fast == (rows == 64) and rows != 32 and chunk < dk else 1,
            "mix_store": "bf16" if fast else "fp32",
            "pdl": hopper,
            "chain": hopper,
            "halves": rows > MAX_WHOLE,
            "prepare_registers": 0,
        }
    )


def _plans(problem: Problem, config: Config) -> tuple[KernelPlan, ...]:
    rows = c.tile_rows(problem)
    row_type = {"bf16": "bf16", "bf16x4": "bf16x2"}.get(config["state_dot"], "fp32")
    halved = config["halves"]
    half = {"C": (rows // 2, "rows of a half of them")} if halved else {}
    prepare = c.context(
        problem,
        {
            "ROWS": (rows, "pending tokens and nodes of a request"),
            **half,
            "BK": (config["slice"], "key dims read at a time"),
            "STAGES": (config["prepare_stages"], "slices under way at a time"),
            "LEVELS": c.solve_levels(rows // 2 if halved else rows),
            "WIDEST": (
                WIDEST_HALVED if halved else WIDEST,
                "range of a channel's sums of gates whose exponentials, of either sign, fp32 holds",
            ),
        },
        MIX_STORE=config["mix_store"],
        ROW_TYPE=row_type,
        WEIGHTS=2,
        PDL=config["pdl"],
        CHAIN=config["chain"],
        MAKES_R=True,
        EXACT_NORMS=c.exact_norms(problem),
        **c.solve_context(problem, config),
        spec_line=c.spec_line(problem, state=False),
        config_line=" ".join(
            f"{name}={config[name]}"
            for name in ("solve", "slice", "prepare_stages", "state_dot", "mix_store", "pdl", "chain")
        ),
    )
    return (
        KernelPlan(
            "verify_prepare_halves.py.jinja" if halved else "verify_prepare_slices.py.jinja",
            c.stem(problem, "verify_prepare_halves" if halved else "verify_prepare_slices", state=False),
            prepare,
            config["prepare_warps"],
            1,
            verify_arguments(problem),
            c.SCRATCH,
            pdl=config["chain"],
            registers=config["prepare_registers"],
        ),
        readout_plan(
            problem,
            config,
            config["mix_store"],
            config["chain"],
            DECAYED=True,
            ROW_TYPE=row_type,
            SCALED=False,
            WEIGHTS=2,
        ),
    )


def _grids(problem: Problem, config: Config, batch: int, heads: int) -> tuple[tuple[int, ...], ...]:
    return ((batch * heads,), readout_grid(problem, config, batch * heads))


def _workspace(problem: Problem, config: Config, batch: int, heads: int) -> tuple[int, int]:
    rows, dk = c.tile_rows(problem), c.power_of_two(problem.dk)
    decayed = 2 * rows * dk // (2 if config["state_dot"] == "bf16" else 1)
    return batch * heads * (rows * rows + decayed), batch * heads * 2 * rows


def _narrow(problem: Problem, gpu: GpuLimits) -> Mapping[str, Callable[[Any], bool]]:
    rows = c.tile_rows(problem)
    return {
        **c.narrow(problem, gpu),
        "state_dot": lambda v: v in dots(problem),
        "halves": lambda v: rows >= 2 * MIN_HALF if v else rows <= MAX_WHOLE,
        "prepare_registers": lambda v: v == 0 or rows >= 2 * MIN_HALF,
    }


TWO_STAGE_SLICES = Variant(
    name="two_stage_slices",
    op="verify",
    doc="a decay a key channel in two kernels: R and decayed rows of a head; then one pass over the state",
    params=PARAMS,
    applies=_applies,
    check=_check,
    default=_default,
    plans=_plans,
    grids=_grids,
    workspace=_workspace,
    narrow=_narrow,
    # Of 64 rows, most are in the pass for strong gates and at the ends of the loop.
    spills=640,
    # Each was the best of some bucket on an H200, or near it.
    starts=(
        {"programs": 0, "prefetch": True},
        {"orient": "state", "mix_store": "fp32", "prepare_warps": 4},
        {"prepare_stages": 2},
        {"slice": 32, "prepare_stages": 2},
        {"slice": 16, "prepare_warps": 1},
        {"halves": True, "slice": 16, "prepare_warps": 1},
        {"halves": True, "slice": 16, "prepare_warps": 1, "prepare_stages": 2},
        {"prepare_registers": 200},
        {"prepare_registers": 168},
        {"programs": 0, "prefetch": True, "bv": 32},
    ),
)
