"""Four kernels a verification of many nodes: what is made a row, inverses of diagonal blocks, R, a pass over the state.

Families that erase nothing have nothing to invert: three kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bole_runtime.kernels.arguments import verify_arguments
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, GpuLimits, KernelPlan, Param, Variant
from bole_runtime.kernels.variants import common as c
from bole_runtime.kernels.variants.two_stage import CHAIN, check_launches

# A block of nodes lies in one word of the ancestor masks, and of 64 rows the inverse spills.
ROW_BLOCK = Param("row_block", (16, 32), "rows of a block of the solve")
BLOCK = Param("block", (32, 64), "rows of the pass over the state that are under way at a time")
MIX = Param(
    "mix", ("bf16", "bf16x5", "tf32", "tf32x3"), "precision of the product with the pseudo-values", ordered=False
)
SOLVE = Param("solve", ("bf16x3", "bf16x6", "tf32x3"), "products of terms that stand for one of the solve")
ROW_WARPS = Param("row_warps", (1, 2, 4), "warps of a program of the first kernel")
INVERSE_WARPS = Param("inverse_warps", (1, 2, 4), "warps of a program that makes inverses")
SOLVE_WARPS = Param("solve_warps", (1, 2, 4), "warps of a program that solves for R")
UNROLL = Param("unroll", (1, 2, 4), "blocks of columns of R that a program keeps in registers at a time")
PARAMS = (
    c.BV,
    BLOCK,
    c.STATE_DOT,
    MIX,
    SOLVE,
    c.WARPS,
    ROW_BLOCK,
    ROW_WARPS,
    INVERSE_WARPS,
    SOLVE_WARPS,
    UNROLL,
    c.PDL,
    CHAIN,
)

#: Below, all of R in one program takes less.
MIN_ROWS = 128
#: Beyond, the pass over the state, whose turns are code of their own, takes a minute to compile.
MAX_ROWS = {"fast": 512, "lossless": 256}
#: Turns of the pass over the state, which are code of their own. What R is multiplied with stays in shared memory.
MAX_TURNS = 8
#: Value heads whose gates a program of the first kernel sums.
HEADS = 16


def mixes(precision: str) -> tuple[str, ...]:
    """Return the values of ``mix`` that keep a profile, best first.

    Two bf16 terms of both operands are 4.3e-6 off, too much beside the state's; three of R make it 2.2e-6.
    """
    return ("bf16", "tf32") if precision == "fast" else ("bf16x5", "tf32x3")


def solves(precision: str) -> tuple[str, ...]:
    """Return the values of ``solve`` that keep a profile, best first.

    Operands of 16 bits keep `fast`; `lossless` needs 24. All have the range of fp32: R grows with write gates above 2.
    """
    return ("bf16x3", "bf16x6", "tf32x3") if precision == "fast" else ("bf16x6", "tf32x3")


def _applies(problem: Problem) -> str | None:
    rows = c.tile_rows(problem)
    most = MAX_ROWS[problem.precision]
    if not MIN_ROWS <= rows <= most:
        return f"{rows} rows are not {MIN_ROWS} to {most}"
    if rows > 32 * MAX_TURNS and c.power_of_two(problem.dk) > 128:
        return f"{rows} rows of {problem.dk} key dims are more than {MAX_TURNS} times what fits the registers"
    return c.check_usual(problem)


def _check(problem: Problem, config: Config, gpu: GpuLimits) -> str | None:
    for name, values in (
        ("state_dot", c.row_dots(problem)),
        ("mix", mixes(problem.precision)),
        ("solve", solves(problem.precision) if c.erases(problem) else SOLVE.choices[-1:]),
    ):
        if config[name] not in values:
            return f"{name}={config[name]} does not keep {problem.precision} for {problem.in_dtype}, or is not needed"
    if config["bv"] > c.power_of_two(problem.dv):
        return f"bv={config['bv']} is wider than dv={problem.dv}"
    for name in ("row_warps", "inverse_warps", "solve_warps"):
        if config[name] * 16 > config["row_block"] * 4:
            return f"{name}={config[name]} have no work on {config['row_block']} rows"
    threads, dk = 32 * config["warps"], c.power_of_two(problem.dk)
    if c.tile_rows(problem) > config["block"] * MAX_TURNS:
        return f"block={config['block']} goes through {c.tile_rows(problem)} rows more than {MAX_TURNS} times"
    if config["bv"] < 16:
        return "a value tile needs at least 16 columns"
    if config["bv"] * dk > 128 * threads:
        return "the state block does not fit the registers of its warps"
    if config["block"] * (2 * config["bv"] + dk) > 128 * threads:
        return "the rows under way do not fit the registers of the warps"
    if not c.erases(problem) and config["unroll"] > 1:
        return f"nothing is solved for family {problem.family!r}: no columns wait for others"
    return check_launches(config, gpu)


def _default(problem: Problem, gpu: GpuLimits) -> Config:
    dk = c.power_of_two(problem.dk)
    bv = max(16, min(64, c.power_of_two(problem.dv), 64 * 128 // dk))
    hopper = gpu.compute_capability >= (9, 0)
    return FOUR_STAGE.config(
        {
            "bv": bv,
            "block": 64 if dk <= 128 else 32,
            "state_dot": c.state_dots(problem.in_dtype, problem.state_dtype, problem.precision)[0],
            "mix": mixes(problem.precision)[0],
            "solve": solves(problem.precision)[0] if c.erases(problem) else "tf32x3",
            "warps": max(4, bv * dk // 4096),
            "row_block": 32,
            "row_warps": 2,
            "inverse_warps": 2,
            "solve_warps": 2,
            "unroll": 2 if c.erases(problem) else 1,
            "pdl": hopper,
            "chain": hopper,
        }
    )


def _blocks(problem: Problem, config: Config) -> tuple[int, int]:
    """Row blocks, and pairs of different ones."""
    blocks = c.tile_rows(problem) // config["row_block"]
    return blocks, blocks * (blocks - 1) // 2


def _known(problem: Problem, config: Config) -> int:
    """Blocks of R of a head that go through memory while it is solved: those of columns beyond the first ones."""
    beyond: int = max(0, _blocks(problem, config)[0] - config["unroll"])
    return beyond * (beyond + 1) // 2


def _inside(problem: Problem) -> bool:
    """Whether every head is solved with its decays: products of rows that are not normalised could grow without."""
    return not c.contracts(problem)


def _refined(problem: Problem) -> bool:
    """Whether what an inverse is off by is corrected."""
    return c.erases(problem) and problem.precision != "fast"


def _mix_store(config: Config) -> str:
    return "bf16" if config["mix"] == "bf16" else "fp32"


def _mix_room(problem: Problem, config: Config) -> int:
    """Elements of fp32 that R of a head takes."""
    rows: int = c.tile_rows(problem)
    return rows * rows // (2 if _mix_store(config) == "bf16" else 1)


def _plans(problem: Problem, config: Config) -> tuple[KernelPlan, ...]:
    rows, block = c.tile_rows(problem), config["row_block"]
    blocks, pairs = _blocks(problem, config)
    arguments = verify_arguments(problem)
    shared = {
        "CLAMPED": True,
        "MAKES_R": True,
        "EXACT_NORMS": c.exact_norms(problem),
        "MIX_STORE": _mix_store(config),
        "MIX_ROOM": _mix_room(problem, config),
        "BLOCKS": blocks,
        "PAIRS": pairs,
        "KNOWN": _known(problem, config),
        "UNROLL": config["unroll"],
        "REFINED": _refined(problem),
        "SUBSTITUTES": False,
        "INSIDE": _inside(problem),
        "SOLVE": config["solve"],
        "PDL": config["pdl"],
        "CHAIN": config["chain"],
    }
    sizes = {"ROWS": (rows, "pending tokens and nodes of a request"), "C": (block, "rows of a block")}

    def plan(what: str, warps: int, names: str, extra: dict[str, Any], **more: Any) -> KernelPlan:
        state = what == "verify_readout_rows"
        context = c.context(problem, {**sizes, **extra}, **{**shared, **more})
        context["spec_line"] = c.spec_line(problem, state=state)
        context["config_line"] = " ".join(f"{n}={config[n]}" for n in (*names.split(), "pdl", "chain"))
        stem = c.stem(problem, what, state=state)
        early = config["chain" if what == "verify_rows" else "pdl"]
        return KernelPlan(f"{what}.py.jinja", stem, context, warps, 1, arguments, c.SCRATCH, pdl=early)

    made = [plan("verify_rows", config["row_warps"], "row_block", {}, HEADS=HEADS)]
    if c.erases(problem):
        more = {"SOLVE_TERMS": 2, "WIDTH": max(block, 32 * config["inverse_warps"])}
        made.append(plan("verify_inverses", config["inverse_warps"], "solve row_block", {}, **more))
    solver = {"SOLVE_TERMS": 2 if c.erases(problem) and config["solve"] == "tf32x3" else 0, "SUBSTITUTES": True}
    made.append(plan("verify_substitute", config["solve_warps"], "solve mix row_block unroll", {}, **solver))
    tile = {"C": (config["block"], "rows of a block"), "BV": (config["bv"], "value columns of a program")}
    readout = {
        "ORIENT": "nodes",
        "STATE_DOT": config["state_dot"],
        "MIX": config["mix"],
        "ROW_BLOCK": block,
        "CHUNKS": rows // config["block"],
        "MAKES_R": False,
        "EXACT_NORMS": False,
    }
    made.append(plan("verify_readout_rows", config["warps"], "bv block state_dot mix", tile, **readout))
    return tuple(made)


def _grids(problem: Problem, config: Config, batch: int, heads: int) -> tuple[tuple[int, ...], ...]:
    blocks, key_heads = _blocks(problem, config)[0], heads // problem.group
    solve = (batch * heads, blocks)
    return (
        (batch * (-(-heads // HEADS) + key_heads), blocks),
        *([solve] if c.erases(problem) else []),
        solve,
        (batch * heads, -(-problem.dv // config["bv"])),
    )


def _workspace(problem: Problem, config: Config, batch: int, heads: int) -> tuple[int, int]:
    rows, key_heads = c.tile_rows(problem), heads // problem.group
    blocks, pairs = _blocks(problem, config)
    room = batch * heads * _mix_room(problem, config)
    if c.erases(problem):
        room += (
            batch
            * (heads * (2 * blocks + _known(problem, config) + pairs) + (0 if _inside(problem) else key_heads * pairs))
            * (config["row_block"] ** 2)
        )
    return room, batch * (heads * 4 + key_heads * 5) * rows


def _narrow(problem: Problem, gpu: GpuLimits) -> Mapping[str, Callable[[Any], bool]]:
    allowed = solves(problem.precision) if c.erases(problem) else SOLVE.choices[-1:]
    return {
        **c.narrow(problem, gpu),
        "bv": lambda v: 16 <= v <= c.power_of_two(problem.dv),
        "mix": lambda v: v in mixes(problem.precision),
        "solve": lambda v: v in allowed,
        "unroll": lambda v: v == 1 or c.erases(problem),
        "row_warps": lambda v: v <= 2,
    }


FOUR_STAGE = Variant(
    name="four_stage",
    op="verify",
    doc="four kernels for many nodes: sums and norms of rows; inverses of diagonal blocks; R; one pass over the state",
    params=PARAMS,
    applies=_applies,
    check=_check,
    default=_default,
    plans=_plans,
    grids=_grids,
    workspace=_workspace,
    narrow=_narrow,
    starts=({"bv": 32}, {"block": 32}, {"solve_warps": 4}, {"inverse_warps": 1}),
)
