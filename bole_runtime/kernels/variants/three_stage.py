"""Three kernels a verification: Gram matrices and sums of gates, R by blocks of rows, one pass over the state.

For trees of several row blocks, where the solve of two_stage makes each Gram block again wherever it needs it.
"""

from __future__ import annotations

from bole_runtime.kernels.arguments import verify_arguments
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, GpuLimits, KernelPlan, Param, Variant
from bole_runtime.kernels.variants import common as c
from bole_runtime.kernels.variants.two_stage import MAX_ROWS, PDL, readout_grid, readout_plan

ROW_BLOCK = Param("row_block", (16, 32), "rows of R a program solves")
GRAM_WARPS = Param("gram_warps", (1, 2, 4), "warps of a program of the first kernel")
SOLVE_WARPS = Param("solve_warps", (1, 2), "warps of a program of the second kernel")
PARAMS = (
    c.ORIENT,
    c.BV,
    c.BK,
    c.STATE_DOT,
    c.MIX,
    c.SOLVE,
    c.WARPS,
    c.STAGES,
    c.PROGRAMS,
    c.PREFETCH,
    ROW_BLOCK,
    GRAM_WARPS,
    SOLVE_WARPS,
    PDL,
)


def _applies(problem: Problem) -> str | None:
    rows = c.tile_rows(problem)
    if not 32 <= rows <= MAX_ROWS:
        return f"{rows} rows are one row block, or more than {MAX_ROWS}"
    if problem.group > 8:
        return f"{problem.group} value heads a key head do not share a program"
    return c.supports_family(problem)


def _check(problem: Problem, config: Config, gpu: GpuLimits) -> str | None:
    reason = c.check_precision(problem, config) or c.check_tile(problem, config)
    if reason:
        return reason
    if config["row_block"] >= c.tile_rows(problem):
        return "one row block needs no kernel for the Gram matrices"
    if config["pdl"] and gpu.compute_capability < (9, 0):
        return "programmatic launch needs compute capability 9.0"
    if config["prefetch"] and config["bk"] < c.power_of_two(problem.dk, 32):
        return "prefetch holds whole rows of the state"
    return c.check_blocks(problem, config)


def _default(problem: Problem, gpu: GpuLimits) -> Config:
    bv = min(64, c.power_of_two(problem.dv))
    return THREE_STAGE.config(
        {
            "orient": "state",
            "bv": bv,
            "bk": min(256, c.power_of_two(problem.dk, 32)),
            "state_dot": c.state_dots(problem.in_dtype, problem.state_dtype, problem.precision)[0],
            "mix": c.mixes(problem.precision)[0],
            "solve": c.solves(problem.precision)[0],
            "warps": c.default_warps(problem, bv),
            "stages": 1,
            "programs": 0,
            "prefetch": False,
            "row_block": 16,
            "gram_warps": 1,
            "solve_warps": 1,
            "pdl": gpu.compute_capability >= (9, 0),
        }
    )


def _plans(problem: Problem, config: Config) -> tuple[KernelPlan, ...]:
    rows = c.tile_rows(problem)
    sizes = {
        "ROWS": (rows, "pending tokens and nodes of a request"),
        "C": (config["row_block"], "rows of a block"),
    }
    line = f"row_block={config['row_block']} pdl={config['pdl']}"
    gram = c.context(
        problem, sizes, HEADS=problem.group, PDL=config["pdl"], MIX_STORE="fp32", config_line=line
    )
    solve = c.context(
        problem,
        {
            **sizes,
            "SOLVE": (f'"{config["solve"]}"', "precision of the triangular solve"),
            "LEVELS": c.solve_levels(config["row_block"]),
        },
        **c.solve_context(config),
        BLOCKS=rows // config["row_block"],
        PDL=config["pdl"],
        config_line=f"{line} solve={config['solve']}",
    )
    args = verify_arguments(problem)
    return (
        KernelPlan(
            "verify_gram.py.jinja", c.stem(problem, "verify_gram"), gram, config["gram_warps"], 1, args, c.SCRATCH
        ),
        KernelPlan(
            "verify_solve.py.jinja",
            c.stem(problem, "verify_solve"),
            solve,
            config["solve_warps"],
            1,
            args,
            c.SCRATCH,
            pdl=config["pdl"],
        ),
        readout_plan(problem, config, mix_store="fp32"),
    )


def _grids(problem: Problem, config: Config, batch: int, heads: int) -> tuple[tuple[int, ...], ...]:
    blocks = c.tile_rows(problem) // config["row_block"]
    return (
        (batch * heads // problem.group, blocks),
        (batch * heads, blocks),
        readout_grid(problem, config, batch * heads),
    )


def _workspace(problem: Problem, config: Config, batch: int, heads: int) -> tuple[int, int]:
    del config
    rows = c.tile_rows(problem)
    key_heads = heads // problem.group
    return batch * (heads + 2 * key_heads) * rows * rows, batch * heads * (c.weights(problem) + 3) * rows


THREE_STAGE = Variant(
    name="three_stage",
    op="verify",
    doc="three kernels: Gram matrices of a key head; R by blocks of rows; one pass over the state",
    params=PARAMS,
    applies=_applies,
    check=_check,
    default=_default,
    plans=_plans,
    grids=_grids,
    workspace=_workspace,
)
