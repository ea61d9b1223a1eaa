"""Two kernels a verification: R of every head by blocks of rows, then one pass over the state."""

from __future__ import annotations

from typing import Any

from bole_runtime.kernels.arguments import verify_arguments
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, GpuLimits, KernelPlan, Param, Variant
from bole_runtime.kernels.variants import common as c
from bole_runtime.kernels.variants.miscompiled import check_compiler
from bole_runtime.kernels.variants.precision import check_precision

ROW_BLOCK = Param("row_block", (16, 32, 64, 128), "rows of R a program of the first kernel makes")
PREPARE_WARPS = Param("prepare_warps", (1, 2, 4, 8), "warps of a program of the first kernel")
GATHER = Param(
    "gather",
    ("apart", "together", "stacked"),
    "k and q in the first kernel: each waited for, asked for at once, or rows of one tile",
    ordered=False,
)
SHARE = Param("share", (False, True), "value heads of a key head share Gram matrices in one program", ordered=False)
MIX_STORE = Param("mix_store", ("fp32", "bf16"), "element type of R between the kernels", ordered=False)
CHAIN = Param("chain", (False, True), "the first kernel too starts early, behind what makes its inputs", ordered=False)
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
    PREPARE_WARPS,
    GATHER,
    SHARE,
    MIX_STORE,
    c.PDL,
    CHAIN,
)

#: R of more rows does not fit shared memory.
MAX_ROWS = 128


def _applies(problem: Problem) -> str | None:
    if c.tile_rows(problem) > MAX_ROWS:
        return f"R of {c.tile_rows(problem)} rows is more than {MAX_ROWS}"
    return c.check_usual(problem)


def _check(problem: Problem, config: Config, gpu: GpuLimits) -> str | None:
    rows, block = c.tile_rows(problem), config["row_block"]
    if block > rows:
        # First: with it, rows are not whole in a block, which the solve would be blamed for.
        return f"row_block={block} is more than the {rows} rows of a tile"
    reason = check_precision(problem, config, whole=block == rows) or c.check_tile(problem, config)
    if reason:
        return reason
    if config["prepare_warps"] * 16 > block * 4:
        return f"prepare_warps={config['prepare_warps']} have no work on {block} rows"
    if config["gather"] != "apart" and block < rows:
        return "k and q are gathered where all rows are in one block"
    if config["gather"] == "stacked" and not c.erases(problem):
        return "k rows of an additive family are not stacked with q rows"
    if config["mix_store"] == "bf16" and (problem.precision != "fast" or config["mix"] != "bf16" or rows > block):
        return "R in bf16 is for the fast profile, a bf16 product and R of one block of rows"
    if config["prefetch"] and config["bk"] < c.power_of_two(problem.dk, 32):
        return "prefetch holds whole rows of the state"
    if config["share"] and not 2 <= problem.group <= 4:
        return f"{problem.group} value heads a key head do not share a program"
    reason = check_launches(config, gpu) or check_compiler(problem, config, narrow=config["programs"] > 0)
    return reason or c.check_blocks(problem, config) or _check_shared(problem, config, gpu)


def check_launches(config: Config, gpu: GpuLimits) -> str | None:
    """Reason why two kernels cannot be launched as a configuration says, or None."""
    if config["pdl"] and gpu.compute_capability < (9, 0):
        return "programmatic launch needs compute capability 9.0"
    if config["chain"] and not config["pdl"]:
        return "a chain of programmatic launches begins with the second kernel"
    return None


def _check_shared(problem: Problem, config: Config, gpu: GpuLimits) -> str | None:
    """Reason why the buffers of the pass over the state do not fit a block's shared memory, or None.

    An upper estimate, as Triton lays buffers over one another where it can.
    """
    rows, bv, bk = c.tile_rows(problem), config["bv"], config["bk"]
    terms = {"bf16": 2, "tf32": 4, "bf16x3": 6, "tf32x3": 8}[config["mix"]]
    r_bytes = rows * rows * (4 if config["mix_store"] == "fp32" else 2)
    if not config["programs"]:
        return None
    inputs = rows * (2 * bk + bv) * c.dtype_bytes(problem.in_dtype) * (2 if problem.pending else 1)
    state = bv * bk * (c.dtype_bytes(problem.state_dtype) + (4 if config["state_dot"] == "bf16x2" else 2))
    need = inputs + state + 2 * r_bytes + rows * bv * terms + 64 * rows
    return f"reading ahead takes about {need >> 10} KiB of shared memory" if need > gpu.smem_per_block else None


def _gather(problem: Problem, rows: int) -> str:
    # Of 64 rows, both at once do not fit the registers.
    if rows > 32:
        return "apart"
    return "stacked" if c.erases(problem) else "together"


def _default(problem: Problem, gpu: GpuLimits) -> Config:
    rows = c.tile_rows(problem)
    bv = min(64, c.power_of_two(problem.dv))
    bv = min(bv, 64 * 128 // min(256, c.power_of_two(problem.dk, 32)))
    # All rows in a program: nothing is made twice. More rows do not fit one.
    whole = rows <= 64
    block = rows if whole else 32
    tiles = problem.work * -(-problem.dv // bv)
    # As many as a multiprocessor of 132 holds at a time, by registers and shared memory of these tiles.
    programs = {True: 512 if rows <= 32 else 256, False: 384 if rows <= 32 else 0}[problem.precision == "fast"]
    walk = 0 < 2 * programs <= tiles and c.power_of_two(problem.dk, 32) <= 256
    config = TWO_STAGE.config(
        {
            "orient": "nodes",
            "bv": bv,
            "bk": min(256, c.power_of_two(problem.dk, 32)),
            "state_dot": c.state_dots(problem.in_dtype, problem.state_dtype, problem.precision)[0],
            "mix": c.mixes(problem.precision)[0],
            "solve": c.default_solve(problem) if whole else c.solves(problem.precision)[0],
            "warps": c.default_warps(problem, bv),
            "stages": 1,
            "programs": programs if walk else 0,
            "row_block": block,
            "prepare_warps": block // 16,
            "gather": _gather(problem, rows),
            # Half the programs for a third of the work more: for many heads only.
            "share": whole and 2 <= problem.group <= 4 and problem.work >= 8 * gpu.sms,
            "prefetch": not walk and c.power_of_two(problem.dk, 32) <= 256,
            "mix_store": "bf16" if whole and problem.precision == "fast" else "fp32",
            "pdl": gpu.compute_capability >= (9, 0),
            "chain": gpu.compute_capability >= (9, 0),
        }
    )
    return TWO_STAGE.config({**config.as_dict(), "programs": 0}) if _check_shared(problem, config, gpu) else config


def _heads(problem: Problem, config: Config) -> int:
    return problem.group if config["share"] else 1


def _line(config: Config, *names: str) -> str:
    return " ".join(f"{name}={config[name]}" for name in names)


def readout_plan(problem: Problem, config: Config, mix_store: str, chain: bool, **more: Any) -> KernelPlan:
    """The pass over the state that ends every variant which makes R in kernels of its own."""
    rows = c.tile_rows(problem)
    readout = c.context(
        problem,
        {
            "ROWS": (rows, "pending tokens and nodes of a request"),
            "BV": (config["bv"], "value columns of a program"),
            # Where a head is narrower than the smallest choice, one block holds it.
            "BK": (min(config["bk"], c.power_of_two(problem.dk)), "key dims read at a time"),
            "TILES": (-(-problem.dv // config["bv"]), "value tiles of a head"),
            "PROGRAMS": (config["programs"], "programs that walk over heads and value tiles"),
        },
        PERSIST=bool(config["programs"]),
        UNREAD=True,
        WHOLE=True,
        CLAMPED=not config["programs"],
        ORIENT=config["orient"],
        STATE_DOT=config["state_dot"],
        MIX=config["mix"],
        MIX_STORE=mix_store,
        PDL=config["pdl"],
        CHAIN=chain,
        PREFETCH=config["prefetch"],
        config_line=_line(config, "orient", "bv", "bk", "state_dot", "mix", "programs", "prefetch", "pdl")
        + f" chain={chain}",
        **more,
    )
    return KernelPlan(
        "verify_readout.py.jinja",
        c.stem(problem, "verify_readout"),
        readout,
        config["warps"],
        config["stages"],
        verify_arguments(problem),
        c.SCRATCH,
        pdl=config["pdl"],
    )


def readout_grid(problem: Problem, config: Config, heads: int) -> tuple[int, ...]:
    """Grid of the pass over the state of so many heads of all requests."""
    tiles = -(-problem.dv // config["bv"])
    return (min(config["programs"], heads * tiles),) if config["programs"] else (heads, tiles)


def _plans(problem: Problem, config: Config) -> tuple[KernelPlan, ...]:
    rows = c.tile_rows(problem)
    blocks = rows // config["row_block"]
    prepare = c.context(
        problem,
        {
            "ROWS": (rows, "pending tokens and nodes of a request"),
            "C": (config["row_block"], "rows of a block"),
            "LEVELS": c.solve_levels(config["row_block"]),
        },
        BLOCKS=blocks,
        GATHER=config["gather"],
        CLAMPED=blocks == 1,
        HEADS=_heads(problem, config),
        MIX_STORE=config["mix_store"],
        PDL=config["pdl"],
        CHAIN=config["chain"],
        WHOLE=blocks == 1,
        MAKES_R=True,
        EXACT_NORMS=c.exact_norms(problem),
        **c.solve_context(problem, config),
        spec_line=c.spec_line(problem, state=False),
        config_line=_line(config, "solve", "row_block", "gather", "share", "mix_store", "pdl", "chain"),
    )
    return (
        KernelPlan(
            "verify_prepare.py.jinja",
            c.stem(problem, "verify_prepare", state=False),
            prepare,
            config["prepare_warps"],
            1,
            verify_arguments(problem),
            c.SCRATCH,
            pdl=config["chain"],
        ),
        readout_plan(problem, config, config["mix_store"], config["chain"]),
    )


def _grids(problem: Problem, config: Config, batch: int, heads: int) -> tuple[tuple[int, ...], ...]:
    blocks = c.tile_rows(problem) // config["row_block"]
    return ((batch * heads // _heads(problem, config), blocks), readout_grid(problem, config, batch * heads))


def _workspace(problem: Problem, config: Config, batch: int, heads: int) -> tuple[int, int]:
    rows, shared = c.tile_rows(problem), _heads(problem, config)
    programs = batch * heads // shared * (rows // config["row_block"])
    return batch * heads * rows * rows, batch * heads * c.weights(problem) * rows + programs * (3 * shared + 3) * rows


TWO_STAGE = Variant(
    name="two_stage",
    op="verify",
    doc="two kernels: R by blocks of rows, a program a key head; then one pass over the state",
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
        {"programs": 0, "prefetch": True},
        {"programs": 0, "prefetch": True, "bv": 128, "warps": 8},
        {"programs": 0, "prefetch": True, "orient": "state", "bv": 64, "warps": 4},
        {"gather": "together"},
        {"programs": 256, "prefetch": False, "share": True},
        {"programs": 384, "prefetch": False, "share": True},
        {"programs": 0, "prefetch": True, "bv": 128, "warps": 4},
        {"programs": 0, "prefetch": True, "bv": 32, "warps": 4},
    ),
)
