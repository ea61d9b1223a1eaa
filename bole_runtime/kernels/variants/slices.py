"""One kernel a verification where every key channel decays by itself, or what is erased is read with rows of its own:
rows and state a few channels at a time."""

from __future__ import annotations

from bole_runtime.kernels.arguments import verify_arguments
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, GpuLimits, KernelPlan, Param, Variant
from bole_runtime.kernels.variants import common as c
from bole_runtime.kernels.variants.miscompiled import check_compiler
from bole_runtime.kernels.variants.precision import check_precision

#: The middle is at most 40 away: e^40 times a key as large as is squared is in fp32, and e^-40 keeps two tf32 terms.
WIDEST = 80.0
#: Of 64, machine code was seen to take descriptors of products from registers that nothing had written.
MAX_ROWS = 32
SLICE = Param("slice", (16, 32), "key channels worked on at a time")
PARAMS = (c.ORIENT, c.BV, SLICE, c.STATE_DOT, c.MIX, c.SOLVE, c.WARPS, c.STAGES)


def _applies(problem: Problem) -> str | None:
    if not c.channels(problem) and c.plain(problem):
        return f"family {problem.family!r} has one decay a head, which other variants take at less cost"
    if c.tile_rows(problem) > MAX_ROWS:
        return f"ptxas 12.8 (Triton 3.6) miscompiles most of these kernels of {c.tile_rows(problem)} rows"
    return c.supports_family(problem)


def _check(problem: Problem, config: Config, gpu: GpuLimits) -> str | None:
    del gpu
    reason = check_precision(problem, config, whole=True) or c.check_tile(problem, config)
    if reason:
        return reason
    reason = check_compiler(problem, config, narrow=True)
    return reason or c.check_state_tile(problem, config["bv"], c.power_of_two(problem.dk), config["warps"])


def _default(problem: Problem, gpu: GpuLimits) -> Config:
    del gpu
    # What all rows make of a slice is costly and wide: tiles of 64 leave it the most registers. No other variant serves
    # where this default cannot.
    bv = min(c.power_of_two(problem.dv), 64, 128 * 128 // c.power_of_two(problem.dk))
    mix = c.mixes(problem.precision)[0]
    return SLICES.config(
        {
            "orient": "nodes",
            "bv": bv,
            "slice": 16,
            "state_dot": c.row_dots(problem)[0],
            "mix": mix,
            "solve": c.default_solve(problem),
            "warps": c.default_warps(problem, bv),
            "stages": 1,
        }
    )


def _plans(problem: Problem, config: Config) -> tuple[KernelPlan, ...]:
    rows = c.tile_rows(problem)
    extra = {
        "ROWS": (rows, "pending tokens and nodes of a request"),
        "BV": (config["bv"], "value columns of a program"),
        "BK": (config["slice"], "key dims read at a time"),
        "STAGES": (config["stages"], "slices under way at a time"),
        "LEVELS": c.solve_levels(rows),
        "WIDEST": (WIDEST, "range of a channel's sums of gates whose exponentials, of either sign, fp32 holds"),
    }
    ctx = c.context(
        problem,
        extra,
        ORIENT=config["orient"],
        STATE_DOT=config["state_dot"],
        MIX=config["mix"],
        PREFETCH=False,
        UNREAD=True,
        MAKES_R=True,
        EXACT_NORMS=c.exact_norms(problem),
        **c.solve_context(problem, config),
        config_line=str(config),
    )
    stem, options = c.stem(problem, "verify_slices"), (config["warps"], config["stages"])
    return (KernelPlan("verify_slices.py.jinja", stem, ctx, *options, verify_arguments(problem)),)


def _grids(problem: Problem, config: Config, batch: int, heads: int) -> tuple[tuple[int, ...], ...]:
    return ((batch * heads, -(-problem.dv // config["bv"])),)


def _workspace(problem: Problem, config: Config, batch: int, heads: int) -> tuple[int, int]:
    del problem, config, batch, heads
    return 0, 0


SLICES = Variant(
    name="slices",
    op="verify",
    doc="one kernel for a decay a key channel or erase rows of their own, a few channels at a time",
    params=PARAMS,
    applies=_applies,
    check=_check,
    default=_default,
    plans=_plans,
    grids=_grids,
    workspace=_workspace,
    narrow=c.narrow,
    starts=(
        {"stages": 2},
        {"stages": 3},
        {"bv": 128, "stages": 2},
        {"bv": 128, "warps": 8, "stages": 2},
        {"bv": 32, "stages": 2},
    ),
)
