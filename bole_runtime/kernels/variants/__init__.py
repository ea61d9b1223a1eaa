"""Registry of the ways to compute an operation.

A new variant is a module here and a template; nothing else lists them.
"""

from __future__ import annotations

import functools

from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Variant
from bole_runtime.kernels.variants.chunked import CHUNKED
from bole_runtime.kernels.variants.commit import COMMIT
from bole_runtime.kernels.variants.commit_blocks import COMMIT_BLOCKS
from bole_runtime.kernels.variants.commit_steps import COMMIT_STEPS
from bole_runtime.kernels.variants.conv import TREE_CONV
from bole_runtime.kernels.variants.conv_commit import CONV_COMMIT
from bole_runtime.kernels.variants.conv_rows import TREE_CONV_ROWS
from bole_runtime.kernels.variants.four_stage import FOUR_STAGE
from bole_runtime.kernels.variants.fused import FUSED
from bole_runtime.kernels.variants.slices import SLICES
from bole_runtime.kernels.variants.three_stage_blocks import THREE_STAGE_BLOCKS
from bole_runtime.kernels.variants.two_stage import TWO_STAGE
from bole_runtime.kernels.variants.two_stage_blocks import TWO_STAGE_BLOCKS
from bole_runtime.kernels.variants.two_stage_slices import TWO_STAGE_SLICES

_ALL: tuple[Variant, ...] = (
    FUSED,
    TWO_STAGE,
    CHUNKED,
    TWO_STAGE_BLOCKS,
    FOUR_STAGE,
    TWO_STAGE_SLICES,
    SLICES,
    THREE_STAGE_BLOCKS,
    COMMIT_STEPS,
    COMMIT_BLOCKS,
    COMMIT,
    TREE_CONV,
    TREE_CONV_ROWS,
    CONV_COMMIT,
)


def all_variants(op: str) -> tuple[Variant, ...]:
    """Return the variants of an operation, in order of preference for the analytic default."""
    return tuple(v for v in _ALL if v.op == op)


@functools.lru_cache(maxsize=4096)
def served(problem: Specialisation) -> bool:
    """Whether a variant takes a problem at all.

    Families with a decay a key channel, or with erase rows of their own, have kernels for some only.
    """
    return any(v.applies(problem) is None for v in all_variants(problem.op))


def get_variant(op: str, name: str) -> Variant:
    """Return a variant by name.

    Raises:
        ValueError: no variant of that operation has the name.
    """
    for v in _ALL:
        if v.op == op and v.name == name:
            return v
    known = ", ".join(repr(v.name) for v in _ALL if v.op == op)
    raise ValueError(f"no {op!r} variant is called {name!r}; known: {known}")
