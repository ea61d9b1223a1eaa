"""Configurations that ptxas 12.8 or Triton 3.6 compiles wrong: refused by every variant that could meet them.

Each was seen to give wrong numbers or an illegal access on a GPU, and does not in the interpreter. A search finds
others: bole_codegen.compile.machine_code reads faults off the machine code of what is compiled ahead.
"""

from __future__ import annotations

from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config
from bole_runtime.kernels.variants.common import channels, plain, tile_rows


def narrow_product(problem: Problem, config: Config) -> bool:
    """Whether the product with the pseudo-values is one whose descriptor ptxas gets wrong in some kernels."""
    sizes = tile_rows(problem) >= 64 and config["bv"] <= 32 and config["warps"] >= 4
    return sizes and config["orient"] == "nodes" and config["mix"] in ("bf16", "bf16x3")


def stacked_product(problem: Problem, state_dot: str, mix: str) -> bool:
    """Whether k and q in one operand give the product with R a descriptor that depends on the depth of the tree."""
    return tile_rows(problem) == 64 and state_dot == "native" and mix == "bf16"


def check_compiler(problem: Problem, config: Config, narrow: bool, stack: bool = False) -> str | None:
    """Reason why a configuration cannot be trusted to be compiled right, or None.

    Args:
        problem: the problem.
        config: the configuration.
        narrow: the product with the pseudo-values is in a kernel that gets :func:`narrow_product` wrong.
        stack: k and q are in one operand of every product.
    """
    if narrow and narrow_product(problem, config):
        return "64 rows by 32 value columns in bf16: ptxas 12.8 (Triton 3.6) miscompiles such products"
    if stack and stacked_product(problem, config["state_dot"], config["mix"]):
        return "64 rows with a 16-bit state as it is: ptxas 12.8 (Triton 3.6) miscompiles such products"
    sliced = channels(problem) or not plain(problem)
    if sliced and tile_rows(problem) == 64 and config["warps"] == 8 and config["orient"] == "nodes":
        return "64 rows with a decay a key channel by 8 warps: seen to read or write out of bounds on an H200"
    rows, columns = tile_rows(problem), config["bv"]
    left, right = (columns, rows) if config["orient"] == "state" else (rows, columns)
    if config["warps"] == 8 and left == 64 and (right <= 16 or config["orient"] == "state"):
        return "64 rows for two groups of 4 warps: Triton 3.6 gives both groups the same rows in some kernels"
    return None
