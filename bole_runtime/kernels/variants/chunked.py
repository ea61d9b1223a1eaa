"""One kernel a verification, any number of nodes: pseudo-values are solved chunk by chunk on the right-hand side."""

from __future__ import annotations

from bole_runtime.kernels.arguments import verify_arguments
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, GpuLimits, KernelPlan, Param, Variant
from bole_runtime.kernels.variants import common as c
from bole_runtime.kernels.variants.precision import check_precision

# Not 64: on an H200 with Triton 3.6 such kernels gave wrong numbers or an illegal access (the interpreter does not).
CHUNK = Param("chunk", (16, 32), "nodes solved at a time")
PARAMS = (c.BV, CHUNK, c.STATE_DOT, c.MIX, c.SOLVE, c.WARPS)


#: Errors of `fast` seen on an H200; pseudo-values are read back, and what they are off by with them.
_ADDED = {"bf16": "1.5e-2", "tf32": "3.7e-3"}


def mixes(problem: Problem) -> tuple[str, ...]:
    """Return the values of ``mix`` that keep the profile, best first."""
    return c.mixes("lossless" if c.erases(problem) else problem.precision)


def _check(problem: Problem, config: Config, gpu: GpuLimits) -> str | None:
    del gpu
    if config["chunk"] > c.tile_rows(problem):
        return f"chunk={config['chunk']} is more than the {c.tile_rows(problem)} rows of a tile"
    if config["bv"] > c.power_of_two(problem.dv):
        return f"bv={config['bv']} is wider than dv={problem.dv}"
    if config["bv"] < 16:
        return "a value tile needs at least 16 columns"
    if config["bv"] * c.power_of_two(problem.dk) > 128 * 128:
        return "the state tile does not fit a program's registers"
    if c.erases(problem) and config["mix"] in ("bf16", "tf32"):
        return f"{config['mix']} pseudo-values of a repeated key add up to {_ADDED[config['mix']]} over 64 nodes"
    return check_precision(problem, config, mixes=mixes(problem))


def _default(problem: Problem, gpu: GpuLimits) -> Config:
    del gpu
    return CHUNKED.config(
        {
            "bv": max(16, min(32, c.power_of_two(problem.dv))),
            "chunk": min(32, c.tile_rows(problem)),
            "state_dot": c.state_dots(problem.in_dtype, problem.state_dtype, problem.precision)[0],
            "mix": mixes(problem)[0],
            "solve": c.solves(problem.precision)[0],
            "warps": 4,
        }
    )


def _plans(problem: Problem, config: Config) -> tuple[KernelPlan, ...]:
    ctx = c.context(
        problem,
        {
            "ROWS": (c.tile_rows(problem), "pending tokens and nodes of a request"),
            "C": (config["chunk"], "nodes of a chunk"),
            "BV": (config["bv"], "value columns of a program"),
            "LEVELS": c.solve_levels(config["chunk"]),
        },
        **c.solve_context(problem, config),
        ORIENT="nodes",
        PREFETCH=False,
        MAKES_R=True,
        EXACT_NORMS=c.exact_norms(problem),
        STATE_DOT=config["state_dot"],
        MIX=config["mix"],
        config_line=str(config),
    )
    return (
        KernelPlan(
            "verify_chunked.py.jinja",
            c.stem(problem, "verify_chunked"),
            ctx,
            config["warps"],
            1,
            verify_arguments(problem),
            c.SCRATCH,
        ),
    )


def _grids(problem: Problem, config: Config, batch: int, heads: int) -> tuple[tuple[int, ...], ...]:
    return ((batch * heads, -(-problem.dv // config["bv"])),)


def _workspace(problem: Problem, config: Config, batch: int, heads: int) -> tuple[int, int]:
    rows, tiles = c.tile_rows(problem), -(-problem.dv // config["bv"])
    return batch * heads * tiles * rows * config["bv"], batch * heads * tiles * 5 * rows


CHUNKED = Variant(
    name="chunked",
    op="verify",
    doc="one kernel for any number of nodes: right-hand sides solved by chunk",
    params=PARAMS,
    applies=c.check_usual,
    check=_check,
    default=_default,
    plans=_plans,
    grids=_grids,
    workspace=_workspace,
    narrow=lambda problem, gpu: {**c.narrow(problem, gpu), "mix": lambda v: v in mixes(problem)},
)
