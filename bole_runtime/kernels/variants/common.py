"""What the variants share: parameters, their meaning for a problem, and the constants every template reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from bole_runtime.families import get_family
from bole_runtime.kernels.gates import argument_name, gate_layout
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, GpuLimits, Param

ORIENT = Param("orient", ("nodes", "state"), "which operand of the state product is on the left", ordered=False)
BV = Param("bv", (8, 16, 32, 64, 128, 256), "value columns a program owns")
BK = Param("bk", (32, 64, 128, 256), "key dims of the state a program reads at a time")
STATE_DOT = Param(
    "state_dot", ("native", "bf16", "bf16x2", "tf32", "tf32x3"), "how node rows meet the state", ordered=False
)
MIX = Param(
    "mix", ("bf16", "tf32", "bf16x3", "tf32x3"), "precision of the product with the pseudo-values", ordered=False
)
SOLVE = Param("solve", ("tf32x3", "fp16", "fp16x2"), "operands of the triangular solve", ordered=False)
WARPS = Param("warps", (1, 2, 4, 8), "warps a program")
STAGES = Param("stages", (1, 2, 3, 4), "software-pipeline depth of loops")

PROGRAMS = Param(
    "programs", (0, 128, 256, 384, 512), "programs that walk over heads and value tiles; 0: one program each"
)
PDL = Param(
    "pdl", (False, True), "a kernel starts early and waits for the one before it (programmatic launch)", ordered=False
)
PREFETCH = Param("prefetch", (False, True), "ask for the state before anything else", ordered=False)

#: Scratch buffers of the verify variants that use any.
SCRATCH = ("work_ptr", "weights_ptr")

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def dtype_bytes(name: str) -> int:
    """Bytes of an element of a dtype short name."""
    return _BYTES[name]


def power_of_two(value: int, least: int = 16) -> int:
    """Return the smallest power of two that is at least ``value`` and ``least``."""
    return max(least, 1 << (value - 1).bit_length())


def tile_rows(problem: Problem) -> int:
    """Rows of a tile that holds the pending chain and all nodes."""
    return power_of_two(problem.nodes + problem.pending)


def state_dots(in_dtype: str, state_dtype: str, precision: str) -> tuple[str, ...]:
    """Return the values of ``state_dot`` that keep a precision profile, best first.

    Products of operands of one 16-bit type are exact in fp32. tf32 holds any 16-bit operand exactly; a bf16
    term holds 8 bits of an fp32 one, two terms 16.
    """
    if in_dtype == state_dtype and in_dtype != "fp32":
        return ("native",)
    if state_dtype != "fp32" and in_dtype != "fp32":
        return ("bf16x2", "tf32") if in_dtype == "bf16" else ("tf32",)
    if precision == "fast":
        return ("bf16",) if in_dtype == "bf16" else ("tf32",)
    return ("bf16x2", "tf32x3") if in_dtype == "bf16" else ("tf32x3",)


def mixes(precision: str) -> tuple[str, ...]:
    """Return the values of ``mix`` that keep a precision profile."""
    return ("bf16", "tf32") if precision == "fast" else ("tf32x3", "bf16x3")


def solves(precision: str, normalised: bool = False) -> tuple[str, ...]:
    """Return the values of ``solve`` that keep a precision profile.

    A bf16 solve holds 3e-3 for random keys only: correlated ones cost it up to 6.6e-3 (tools/solve_rounding.py). fp16
    has the bits of tf32, and the range for products of normalised rows. An inverse in tf32 rounds decays into A, and
    what repeated keys make of that grows with the nodes, to 3e-2 for 128: it takes three products in `fast` too.
    """
    if normalised:
        return ("tf32x3", "fp16") if precision == "fast" else ("tf32x3", "fp16x2")
    return ("tf32x3",)


def erases(problem: Problem) -> bool:
    """Whether the family's update takes away what the state predicts: without, there is nothing to solve."""
    return gate_layout(problem.family, problem.gate_mode).erases


def plain(problem: Problem) -> bool:
    """Whether an update adds or is the usual delta rule: its solve is of k k^T, and no rows but k and q are read."""
    return gate_layout(problem.family, problem.gate_mode).plain


def contracts(problem: Problem) -> bool:
    """Whether values stay in the range of fp16 in a solve by depth: k k^T of normalised rows, times a gate."""
    return problem.qk_l2norm and erases(problem) and plain(problem)


def default_solve(problem: Problem) -> str:
    """Return how a block of all rows is solved without a measurement: by depth where rows are normalised.

    Measured on an H200 for 64 nodes and 8 levels: 151 us a layer against 205 (fast), 236 against 320 (lossless).
    """
    return solves(problem.precision, contracts(problem))[-1]


def solve_context(problem: Problem, config: Config) -> dict[str, Any]:
    """Switches of the solve: fp16 and tf32 terms of an operand, 0 for another type; and how it solves.

    With operands in fp16, a product a depth of the tree; with others the inverse of the triangle, by blocks.
    """
    if not erases(problem):
        return {}
    halves = {"fp16": 1, "fp16x2": 2}.get(config["solve"], 0)
    terms = 2 if config["solve"] == "tf32x3" else 0
    refined = problem.op == "commit" or problem.precision != "fast"
    return {"HALVES": halves, "SOLVE_TERMS": terms, "SOLVER": "neumann" if halves else "inverse", "REFINED": refined}


def scaled(problem: Problem) -> bool:
    """Whether rows can be too large to square in fp32."""
    return problem.qk_l2norm and problem.in_dtype != "fp16"


def weights(problem: Problem) -> int:
    """Factors a row that the first of two kernels hands to the second."""
    return 4 if scaled(problem) else 2


def channels(problem: Problem) -> bool:
    """Whether every key channel decays by itself: decayed rows are fp32, and no key head's products are shared."""
    return gate_layout(problem.family, problem.gate_mode).decay_per_channel


def check_one_decay(problem: Problem) -> str | None:
    """Reason why a variant that takes one decay a node and head, or none, cannot serve a family, or None."""
    if channels(problem):
        return f"family {problem.family!r} has a decay a key channel, which this variant does not take"
    return supports_family(problem)


def check_plain(problem: Problem) -> str | None:
    """Reason why a variant whose updates add, or erase along k with k, cannot serve a family, or None."""
    if not plain(problem):
        return f"family {problem.family!r} erases with rows of its own, which this variant does not take"
    return supports_family(problem)


def check_usual(problem: Problem) -> str | None:
    """Reason why a variant for one decay a node and updates along k alone cannot serve a family, or None."""
    return check_one_decay(problem) or check_plain(problem)


def row_dots(problem: Problem) -> tuple[str, ...]:
    """Return the values of ``state_dot`` that keep the precision profile of a verification, best first."""
    if channels(problem) or not plain(problem):
        return ("tf32",) if problem.precision == "fast" else ("tf32x3",)
    return state_dots(problem.in_dtype, problem.state_dtype, problem.precision)


def narrow(problem: Problem, gpu: GpuLimits) -> dict[str, Callable[[Any], bool]]:
    """Tests of single parameters of a verify configuration: what precision and sizes allow, and is worth a search.

    A programmatic launch has not been slower where a GPU has it.
    """
    rows, dots = tile_rows(problem), row_dots(problem)
    return {
        "bv": lambda v: v <= power_of_two(problem.dv),
        "bk": lambda v: min(128, power_of_two(problem.dk, 32)) <= v <= power_of_two(problem.dk, 32),
        "state_dot": lambda v: v in dots,
        "mix": lambda v: v in mixes(problem.precision),
        "solve": lambda v: v in solves(problem.precision, contracts(problem)),
        "stack": lambda v: not v or erases(problem),
        "row_block": lambda v: v <= rows,
        "chunk": lambda v: v <= rows,
        # Two tiles of 64 value columns each, at least: there is nothing to walk over otherwise.
        "programs": lambda v: 128 * v <= problem.work * power_of_two(problem.dv),
        "pdl": lambda v: v == (gpu.compute_capability >= (9, 0)),
    }


def check_tile(problem: Problem, config: Config) -> str | None:
    """Reason why the value tile does not fit the head dimension, or None."""
    dv_pad = power_of_two(problem.dv)
    if config["bv"] > dv_pad:
        return f"bv={config['bv']} is wider than dv={problem.dv}"
    if config["orient"] == "state" and config["bv"] < 16:
        return "a state-major product needs at least 16 value columns"
    return None


def supports_family(problem: Problem) -> str | None:
    """Reason why the templates cannot serve a family, or None."""
    return None if get_family(problem.family).kernels else f"family {problem.family!r} has no templates"


def constants(problem: Problem, extra: dict[str, tuple[Any, str]]) -> list[tuple[str, Any, str]]:
    """Module constants of a kernel, with one line of documentation each."""
    spec = get_family(problem.family)
    base: dict[str, tuple[Any, str]] = {
        "GROUP": (problem.group, "value heads a key head"),
        "DK": (problem.dk, "key head dim"),
        "DK_PAD": (power_of_two(problem.dk), "its power of two"),
        "DV": (problem.dv, "value head dim"),
        "DV_PAD": (power_of_two(problem.dv), "its power of two"),
        "WORDS": ((problem.nodes + 31) // 32, "32-bit words of a node's ancestor mask"),
    }
    if problem.qk_l2norm:
        base["EPS"] = (spec.l2norm_eps, "inside the root of the l2 norm")
    if problem.pending:
        base["MAX_PENDING"] = (problem.pending, "capacity for pending tokens")
    return [(name, value, doc) for name, (value, doc) in {**base, **extra}.items()]


def named(gates: Iterable[str]) -> tuple[str, ...]:
    """What gates are named in kernels."""
    return tuple(argument_name(gate) for gate in gates)


def context(problem: Problem, extra: dict[str, tuple[Any, str]], **more: Any) -> dict[str, Any]:
    """Everything a template reads: module constants and the switches that shape its text."""
    gates = gate_layout(problem.family, problem.gate_mode)
    out: dict[str, Any] = {
        "constants": constants(problem, extra),
        "PENDING": problem.pending,
        "RAW": problem.gate_mode != "ready",
        "GATES": named(gates.nodes),
        "READY": gates.ready,
        "PARAMETERS": () if gates.decay_per_head else named(gates.parameters),
        "OPTIONAL": named(n for n in gates.parameters if n in gates.optional),
        "FORMULA": gates.formula,
        "FORMULA_OPTIONS": gates.formula_options,
        "DECAY": gates.decay,
        "HEAD_DECAY": gates.decay_per_head,
        "CHANNEL": gates.decay_per_channel,
        "KEEPS_READY": gates.keeps_ready,
        "KEPT": gates.kept,
        "VECTORS": named(sorted(gates.vectors - gates.value_vectors)),
        "VALUE_VECTORS": named(sorted(gates.value_vectors)),
        "KEY_HEADS": named(sorted(gates.key_heads)),
        "PASSED": named(n for n in gates.nodes if n in gates.ready),
        "UNIT": gates.unit,
        "WRITE": gates.write if gates.write not in gates.value_vectors else "",
        "VALUE_WRITE": gates.write if gates.write in gates.value_vectors else "",
        "ERASE": gates.erases,
        "PLAIN": gates.plain,
        "ERASED": "k" if gates.plain else "f",
        "ROW": "k" if gates.plain or gates.erase_row == "k" else "f",
        "ERASE_ROW": gates.erase_row,
        "ERASE_GATE": gates.erase_gate,
        "ERASE_SCALE": gates.erase_scale,
        "ERASE_SIGN": gates.erase_sign,
        "ERASE_WRITE": gates.erase_write,
        "ERASE_NORMED": problem.qk_l2norm and gates.erase_row in get_family(problem.family).normed,
        "UNDECAYED": gates.undecayed,
        "SKIP": gates.skip.lower(),
        "L2NORM": problem.qk_l2norm,
        "SCALED": scaled(problem),
        "EXACT_NORMS": False,
        "MAKES_R": False,
        "CLAMPED": False,
        "GATHER": "apart",
        "SPLIT_KEYS": False,
        "HALVES": 0,
        "SOLVE_TERMS": 0,
        "SOLVER": "inverse",
        "REFINED": False,
        "WHOLE": False,
        "PERSIST": False,
        "DECAYED": False,
        "ROW_TYPE": "",
        "UNREAD": False,
        "TRIANGLE": 0,
        "LOG2E": math.log2(math.e),
        "ONE_SUM": problem.precision == "fast" and problem.op == "verify",
        "WEIGHTS": weights(problem),
        "IN": problem.in_dtype,
        "STATE": problem.state_dtype,
        "PRECISION": problem.precision,
        "spec_line": spec_line(problem),
    }
    out.update(more)
    # Sums of one decay a head down the tree, of all rows at once.
    out["PATH_SUMS"] = out["WHOLE"] or not (gates.plain or gates.decay_per_channel)
    return out


def exact_norms(problem: Problem) -> bool:
    """Whether products of keys are divided by their lengths as if these had not been rounded.

    A repeated key meets itself at every node, and a rounding of its length adds up: 128 nodes make 1e-7 1e-5.
    """
    merged = not gate_layout(problem.family, problem.gate_mode).erase_write
    return problem.qk_l2norm and erases(problem) and merged and problem.precision != "fast"


def spec_line(problem: Problem, state: bool = True) -> str:
    """What a kernel is for, in its header. ``state``: whether its text depends on the type of the state."""
    return (
        f"{problem.op} {problem.family} dk{problem.dk} dv{problem.dv} group{problem.group} {problem.in_dtype} "
        f"state {problem.state_dtype if state else 'any'} gates {problem.gate_mode} {problem.precision} "
        f"nodes {problem.nodes} pending {problem.pending}{'' if problem.qk_l2norm else ' no l2norm'}"
    )


def stem(problem: Problem, what: str, state: bool = True) -> str:
    """Readable name of a kernel. ``state``: whether its text depends on the type of the state."""
    return (
        f"{problem.family}_{what}_k{problem.dk}v{problem.dv}g{problem.group}_{problem.in_dtype}"
        f"{f'_s{problem.state_dtype}' if state else ''}_{problem.gate_mode}_{problem.precision}_n{problem.nodes}"
        + (f"p{problem.pending}" if problem.pending else "")
    )


def check_blocks(problem: Problem, config: Config) -> str | None:
    """Reason why the tiles of a state pass are too large or too small for the program's warps, or None."""
    dk_pad = power_of_two(problem.dk, 32)
    if config["bk"] > dk_pad:
        return f"bk={config['bk']} is wider than dk={problem.dk}"
    if config["bk"] < min(dk_pad, 128):
        return f"bk={config['bk']}: key dims up to 128 are read at once"
    if config["bk"] == dk_pad and config["stages"] != 1:
        return "without a loop over key dims there is nothing to pipeline"
    if config["programs"] and (config["bk"] < dk_pad or config["prefetch"]):
        return "programs that walk over heads read whole rows of the state, and ahead by themselves"
    if config["bk"] < dk_pad and config["stages"] == 1:
        return "a loop over key dims that is not pipelined waits for each block"
    return check_state_tile(problem, config["bv"], config["bk"], config["warps"])


def check_state_tile(problem: Problem, bv: int, bk: int, warps: int) -> str | None:
    """Reason why a block of the state or its accumulators do not suit a number of warps, or None."""
    threads = 32 * warps
    if bv * bk > 128 * threads:
        return "the state block does not fit the registers of its warps"
    if bv * bk < 4 * threads:
        return "more threads than there is state to read"
    if tile_rows(problem) * bv * 2 > 128 * threads:
        return "the accumulators do not fit the registers of the warps"
    return None


def default_warps(problem: Problem, bv: int) -> int:
    """Warps for a tile of bv whole rows of the state: 4, fewer where there is little to read."""
    return max(1, min(4, bv * power_of_two(problem.dk, 32) // 256))


def solve_levels(size: int) -> tuple[int, str]:
    """Constant LEVELS of the triangular inverse of a power of two."""
    return size.bit_length() - 1, "doublings from 1 to the size of a solved block"
