"""Commit of all layers in one launch, by a solve on tensor cores, for chains and long paths.

A program makes what a solve takes of a chunk of tokens once, and walks with it over its value columns. Their rows of
the state stay in the registers of a warp's products.
"""

from __future__ import annotations

from typing import Any

from bole_runtime.calls import RowAction
from bole_runtime.kernels.arguments import commit_arguments, commit_pointers, usual_gate_dtypes
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, GpuLimits, KernelPlan, Param, Variant
from bole_runtime.kernels.variants import common as c

CHUNK = Param("chunk", (16, 32), "tokens of the accepted path folded in a pass over the value columns, 16 at a time")
STEP = Param("step", (16, 32, 64), "value columns in registers at a time")
DOT = Param(
    "dot", ("bf16", "bf16x2", "bf16x3", "tf32", "tf32x3", "ieee"), "precision of products with the state", ordered=False
)
SLICE = Param("slice", (32, 64, 128), "key dims of a tensor of the state, whose terms and changes are held at a time")
REGISTERS = Param("registers", (0, 128, 168, 200), "most registers a thread may take; 0: any number")
PARAMS = (c.BV, STEP, CHUNK, DOT, SLICE, REGISTERS, c.WARPS)


def dots(problem: Problem) -> tuple[str, ...]:
    """Return the values of ``dot`` that keep the precision profile for a problem, best first."""
    if problem.precision == "fast":
        return ("bf16x2", "tf32") if problem.in_dtype == "bf16" else ("tf32",)
    if problem.in_dtype == "bf16":
        # Measured on an H200, one key repeated 16 times, beta 1.9, g -0.05: 6.2e-7 off, and 2.4e-6 by tf32 terms.
        return ("bf16x3",) if c.erases(problem) else ("bf16x3", "tf32x3")
    return ("tf32x3", "ieee")


def _check(problem: Problem, config: Config, gpu: GpuLimits) -> str | None:
    del gpu
    if config["dot"] not in dots(problem):
        return f"dot={config['dot']} does not keep {problem.precision} for {problem.in_dtype} keys"
    if config["bv"] > c.power_of_two(problem.dv):
        return f"bv={config['bv']} is wider than dv={problem.dv}"
    if config["step"] > config["bv"]:
        return f"step={config['step']} is wider than bv={config['bv']}"
    if config["step"] < 16 * config["warps"]:
        return "a warp holds whole rows of the state, 16 at least"
    if config["slice"] > c.power_of_two(problem.dk, 32):
        return f"slice={config['slice']} is wider than dk={problem.dk}"
    if config["step"] * c.power_of_two(problem.dk) > 128 * 32 * config["warps"]:
        return "the state tile does not fit a program's registers"
    return None


def _default(problem: Problem, gpu: GpuLimits) -> Config:
    # A program a head makes what a solve takes once; few heads are spread over more programs.
    columns = 16 if problem.work < gpu.sms else 64 if problem.work < 8 * gpu.sms else 128
    values: dict[str, int | str] = {
        "bv": min(c.power_of_two(problem.dv), columns),
        "step": 16,
        "chunk": 32 if problem.pending else 16,
        "dot": dots(problem)[0],
        "slice": 32,
        "registers": 168,
        "warps": 1,
    }
    if problem.pending and c.erases(problem):
        values.update(_chain(problem, columns))
    return COMMIT.config(values)


def _chain(problem: Problem, columns: int) -> dict[str, int | str]:
    """Changes for a chain above a path, which are mostly solved for: what is made once is made for all of a head.

    Measured on an H200, 128 x 128, bf16, `lossless`: four warps take half the time of `steps` (3.4, 24.8 and 196.5 us
    for 1, 8 and 64 requests), one warp with all registers 163.4 for 64. Four multiply as a group, which ptxas 12.8
    compiles wrong in some kernels of other sizes and types: those take one.
    """
    sizes = c.power_of_two(problem.dk), c.power_of_two(problem.dv)
    if columns < 128 and sizes == (128, 128) and problem.in_dtype == "bf16":
        return {"bv": 128, "step": 64, "slice": 128, "registers": 0, "warps": 4}
    return {"registers": 0}


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
    template: str,
    what: str,
    problem: Problem,
    config: Config,
    sizes: dict[str, tuple[Any, str]],
    registers: int = 0,
    **more: Any,
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
        arguments = commit_arguments(problem, table)
        plans.append(KernelPlan(template, stem, ctx, config["warps"], 1, arguments, registers=registers))
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
            "C": (16, "tokens of a chunk"),
            "STEP": (config["step"], "value columns in registers at a time"),
            "WIDTH": (min(config["slice"], c.power_of_two(problem.dk)), "key dims of a tensor of the state"),
        },
        registers=config["registers"],
        CHUNKS=config["chunk"] // 16,
        SLICES=-(-problem.dk // config["slice"]),
        SPLIT_KEYS=True,
        MAKES_R=True,
        SOLVE_TERMS=2 if c.erases(problem) and not config["dot"].startswith("bf16") else 0,
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
    # Most of it is what a chunk is prepared with, once for many tiles; fewer registers make room for more programs.
    spills=1024,
    # Each is the fewest instructions for its purpose: a program a head, narrower ones, two warps of it, one chunk.
    starts=(
        {"bv": 128, "step": 16, "slice": 32, "registers": 0, "warps": 1},
        {"bv": 128, "step": 16, "slice": 32, "registers": 168, "warps": 1},
        {"bv": 64, "step": 16, "slice": 32, "registers": 168, "warps": 1},
        {"bv": 128, "step": 32, "slice": 32, "registers": 0, "warps": 2},
        {"bv": 128, "step": 64, "slice": 128, "registers": 0, "warps": 4},
    ),
)
