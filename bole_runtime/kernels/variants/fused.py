"""One kernel a verification: each program prepares R of its head and reads its tile of the state."""

from __future__ import annotations

from bole_runtime.kernels.arguments import verify_arguments
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, GpuLimits, KernelPlan, Param, Variant
from bole_runtime.kernels.variants import common as c
from bole_runtime.kernels.variants.miscompiled import check_compiler, stacked_product
from bole_runtime.kernels.variants.precision import check_precision

STACK = Param("stack", (False, True), "k and q in one operand of every product", ordered=False)
PARAMS = (c.ORIENT, c.BV, c.STATE_DOT, c.MIX, c.SOLVE, c.WARPS, c.PREFETCH, STACK)


def _applies(problem: Problem) -> str | None:
    if c.tile_rows(problem) > 64:
        return f"R of {c.tile_rows(problem)} rows does not fit a program"
    return c.check_usual(problem)


def _check(problem: Problem, config: Config, gpu: GpuLimits) -> str | None:
    del gpu
    reason = check_precision(problem, config, whole=True) or c.check_tile(problem, config)
    if reason:
        return reason
    if config["stack"] and not c.erases(problem):
        return "k rows of an additive family do not meet the state"
    reason = check_compiler(problem, config, narrow=True, stack=config["stack"])
    return reason or c.check_state_tile(problem, config["bv"], c.power_of_two(problem.dk), config["warps"])


def _default(problem: Problem, gpu: GpuLimits) -> Config:
    # Few heads: narrow tiles spread a head over more SMs. Many heads: whole heads, so that R is made once.
    few = problem.work < gpu.sms
    mix = c.mixes(problem.precision)[0]
    wide = 128 if c.tile_rows(problem) <= 32 and not few else 64
    bv = min(c.power_of_two(problem.dv), 32 if few and not (c.tile_rows(problem) == 64 and mix == "bf16") else wide)
    bv = min(bv, 128 * 128 // c.power_of_two(problem.dk))
    state_dot = c.row_dots(problem)[0]
    stack = c.erases(problem) and not stacked_product(problem, state_dot, mix)
    orient, warps = "nodes" if few else "state", c.default_warps(problem, bv)
    return FUSED.config(
        {
            "orient": orient,
            "bv": bv,
            "state_dot": state_dot,
            "mix": mix,
            "solve": c.default_solve(problem),
            "warps": warps,
            "prefetch": True,
            "stack": stack,
        }
    )


def _plans(problem: Problem, config: Config) -> tuple[KernelPlan, ...]:
    rows = c.tile_rows(problem)
    extra = {
        "ROWS": (rows, "pending tokens and nodes of a request"),
        "BV": (config["bv"], "value columns of a program"),
        "BK": (c.power_of_two(problem.dk), "key dims read at a time"),
        "LEVELS": c.solve_levels(rows),
    }
    ctx = c.context(
        problem,
        extra,
        ORIENT=config["orient"],
        STATE_DOT=config["state_dot"],
        MIX=config["mix"],
        PREFETCH=config["prefetch"],
        STACK=config["stack"],
        WHOLE=True,
        CLAMPED=True,
        UNREAD=True,
        MAKES_R=True,
        EXACT_NORMS=c.exact_norms(problem),
        **c.solve_context(problem, config),
        config_line=str(config),
    )
    return (
        KernelPlan(
            "verify_fused.py.jinja",
            c.stem(problem, "verify_fused"),
            ctx,
            config["warps"],
            1,
            verify_arguments(problem),
        ),
    )


def _grids(problem: Problem, config: Config, batch: int, heads: int) -> tuple[tuple[int, ...], ...]:
    return ((batch * heads, -(-problem.dv // config["bv"])),)


def _workspace(problem: Problem, config: Config, batch: int, heads: int) -> tuple[int, int]:
    del problem, config, batch, heads
    return 0, 0


FUSED = Variant(
    name="fused",
    op="verify",
    doc="one kernel: R and one pass over the state, a program a head and value tile",
    params=PARAMS,
    applies=_applies,
    check=_check,
    default=_default,
    plans=_plans,
    grids=_grids,
    workspace=_workspace,
    narrow=c.narrow,
    # Each was the best of some bucket on an H200.
    starts=(
        {"orient": "nodes", "bv": 16, "warps": 1},
        {"orient": "nodes", "bv": 32, "warps": 2},
        {"orient": "state", "bv": 64, "warps": 2},
        {"orient": "nodes", "bv": 128, "warps": 4},
        {"orient": "nodes", "bv": 128, "warps": 4, "stack": False},
        {"orient": "state", "bv": 128, "warps": 4},
        {"orient": "nodes", "bv": 64, "warps": 4},
    ),
)
