"""Commit of all layers in one launch, by a solve: a program rewrites a value tile of a head of a layer."""

from __future__ import annotations

from typing import Any

from bole_runtime.calls import RowAction
from bole_runtime.kernels.arguments import commit_arguments, commit_pointers, usual_gate_dtypes
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, GpuLimits, KernelPlan, Param, Variant
from bole_runtime.kernels.variants import common as c

CHUNK = Param("chunk", (16, 32), "tokens of the accepted path folded at a time")
DOT = Param(
    "dot", ("bf16", "bf16x2", "bf16x3", "tf32", "tf32x3", "ieee"), "precision of products with the state", ordered=False
)
PARAMS = (c.BV, CHUNK, DOT, c.SOLVE, c.WARPS)


def dots(problem: Problem) -> tuple[str, ...]:
    """Return the values of ``dot`` that keep the precision profile for a problem, best first."""
    if problem.precision == "fast":
        return ("bf16x2", "tf32") if problem.in_dtype == "bf16" else ("tf32",)
    return ("bf16x3", "tf32x3") if problem.in_dtype == "bf16" else ("tf32x3", "ieee")


def _check(problem: Problem, config: Config, gpu: GpuLimits) -> str | None:
    del gpu
    if config["dot"] not in dots(problem):
        return f"dot={config['dot']} does not keep {problem.precision} for {problem.in_dtype} keys"
    if config["solve"] != c.solves("lossless")[0]:
        return "a commit solves at full precision: its error stays in the state"
    if config["bv"] > c.power_of_two(problem.dv):
        return f"bv={config['bv']} is wider than dv={problem.dv}"
    if config["bv"] < 16:
        return "a value tile needs at least 16 columns"
    if config["bv"] * c.power_of_two(problem.dk) > 256 * 32 * config["warps"]:
        return "the state tile does not fit a program's registers"
    return None


def _default(problem: Problem, gpu: GpuLimits) -> Config:
    del gpu
    bv = max(16, min(c.power_of_two(problem.dv), 32, 128 * 32 // c.power_of_two(problem.dk)))
    return COMMIT.config({"bv": bv, "chunk": 16, "dot": dots(problem)[0], "solve": "tf32x3", "warps": 4})


def _element_types(problem: Problem) -> list[str]:
    gates = iter(problem.gate_dtypes or usual_gate_dtypes(problem))
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "none": ""}
    kinds = {"in": problem.in_dtype, "state": problem.state_dtype, "f32": "fp32"}
    return [
        "int32" if a.kind == "i32" else names[next(gates) if a.kind == "gate" else kinds[a.kind]]
        for a in commit_pointers(problem)
    ]


#: What a row of a commit with a pending chain can ask for.
_ACTIONS = {
    "COMMIT": (int(RowAction.COMMIT), "action: fold the chain and the accepted path"),
    "FLUSH": (int(RowAction.FLUSH), "action: fold the chain alone"),
    "APPEND": (int(RowAction.APPEND), "action: copy the path behind the chain"),
}


def layer_plans(
    template: str, what: str, problem: Problem, config: Config, sizes: dict[str, tuple[Any, str]], **more: Any
) -> tuple[KernelPlan, ...]:
    """The same text with pointers from arguments (one layer) or from a table in device memory (all layers)."""
    tiles = config.as_dict().get("tiles", 1)
    assert isinstance(tiles, int)
    # A kernel of one tile is named as it was before there could be more.
    line = Config(config.variant, tuple(p for p in config.params if p != ("tiles", 1)))
    pointers = list(zip((a.name for a in commit_pointers(problem)), _element_types(problem), strict=True))
    plans = []
    for table in (False, True):
        # Only a table of pointers says their types.
        ctx = c.context(
            problem,
            {
                "NODES": (problem.nodes, "nodes of a request"),
                "BV": (config["bv"], "value columns of a tile" if tiles > 1 else "value columns of a program"),
                **({"TILES": (tiles, "tiles of a program, one after the other")} if tiles > 1 else {}),
                **_ACTIONS,
                **sizes,
            },
            TABLE=table,
            **({"TILES": 1} if tiles == 1 else {}),
            spec_line=c.spec_line(problem, state=table),
            config_line=f"{line} {'layer table' if table else 'one layer'}",
            pointer_args=pointers,
            **more,
        )
        stem = c.stem(problem, f"{what}_layers" if table else what, state=table)
        plans.append(KernelPlan(template, stem, ctx, config["warps"], 1, commit_arguments(problem, table)))
    return tuple(plans)


def grids(problem: Problem, config: Config, batch: int, heads: int) -> tuple[tuple[int, ...], ...]:
    """Grids of both plans. ``batch`` counts the rows of all layers."""
    tiles = config.as_dict().get("tiles", 1)
    assert isinstance(tiles, int)
    grid = (batch * heads, -(-problem.dv // (config["bv"] * tiles)))
    return grid, grid


def no_workspace(problem: Problem, config: Config, batch: int, heads: int) -> tuple[int, int]:
    """Commits need no scratch memory."""
    del problem, config, batch, heads
    return 0, 0


def _plans(problem: Problem, config: Config) -> tuple[KernelPlan, ...]:
    return layer_plans(
        "commit.py.jinja",
        "commit",
        problem,
        config,
        {
            "C": (config["chunk"], "tokens folded at a time"),
            "LEVELS": c.solve_levels(config["chunk"]),
        },
        **c.solve_context(problem, config),
        MAKES_R=c.erases(problem),
        EXACT_NORMS=c.exact_norms(problem),
        DOT=config["dot"],
    )


COMMIT = Variant(
    name="path",
    op="commit",
    doc="pseudo-values of the accepted path recomputed from raw inputs, state rewritten in place",
    params=PARAMS,
    applies=c.check_usual,
    check=_check,
    default=_default,
    plans=_plans,
    grids=grids,
    workspace=no_workspace,
    # A solve rounds once more than the recurrence: 64 tokens that nearly repeat a key, with beta near 2, are 7e-6 off.
    narrow=lambda problem, gpu: {"chunk": lambda _: not c.erases(problem)},
)
