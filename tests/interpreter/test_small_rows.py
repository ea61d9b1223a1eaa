"""Up to 8 nodes above up to 8 pending tokens: tiles of 16 rows with a chain inside, on interpreted kernels."""

from __future__ import annotations

import pytest
import torch
from bole_testing.cases.base import dense_tree, leaves, packed_tree
from bole_testing.cases.checks import check_commit, check_verify
from bole_testing.families import family_inputs, family_pending
from bole_testing.pins import DISPATCH, Pin, pin, pinned_setup, problem_of_verify, problems_of_commit

from bole_runtime.families import get_family
from bole_runtime.kernels.variants.common import tile_rows

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]

FP32, FP16 = torch.float32, torch.float16
#: A chain that fills its rows, a ragged tree, one with padding above and below, nothing but roots.
TREES = [[-1, 0, 1, 2, 3, 4, 5, 6], [-1, 0, 0, 1, 1, 2, -1, 5], [-2, -1, 1, -2, 1, 4, -2, -2], [-1] * 8]
SLOTS = [4, 0, 2, 3]
#: Of every slot: the chain of nodes stands above a full ring, so that 16 rows are a path.
LENGTHS, STARTS = [0, 1, 5, 8, 8, 3], [3, 0, 6, 0, 7, 2]

CALLS: tuple[tuple[str, Pin], ...] = (
    ("gdn", pin("fused", bv=16)),
    ("gdn", pin("fused", bv=32, orient="state", stack=False, solve="fp32")),
    ("gdn", pin("two_stage", bv=16, share=True)),
    ("gdn", pin("two_stage", bv=32, orient="state", gather="stacked")),
    ("gdn", pin("two_stage", programs=128, bv=16, solve="fp32")),
    ("gdn", pin("chunked", chunk=16, bv=16)),
    ("gdn", Pin(DISPATCH)),
    ("mamba2", pin("two_stage", bv=16)),
    ("lightning", pin("fused", bv=16)),
    ("kda", pin("slices", bv=16)),
    ("kda", pin("two_stage_slices", bv=16)),
    ("rwkv7", pin("slices", bv=16)),
)


@pytest.mark.parametrize(("precision", "types"), [("lossless", (FP32, FP32)), ("fast", (FP16, FP16))], ids=str)
@pytest.mark.parametrize(("name", "pinned"), CALLS, ids=str)
def test_verify(name: str, pinned: Pin, precision: str, types: tuple[torch.dtype, torch.dtype]) -> None:
    setup, spec = pinned_setup(pinned, "cpu", *types, precision), get_family(name)
    packed = pinned.variant in ("fused", "slices") and precision == "fast"
    tree = packed_tree(setup, TREES, 8) if packed else dense_tree(setup, TREES)
    inputs = family_inputs(setup, spec, tree, heads=(1, 2), dims=(24, 20), mode=spec.modes[-1], slots=SLOTS)
    chain = family_pending(setup, spec, spec.modes[-1], inputs, 8, LENGTHS, STARTS)
    inputs = inputs.replace(options={**inputs.options, "pending": chain})
    problem = problem_of_verify(inputs.q, inputs.k, inputs.v, precision=precision, **inputs.arguments)
    assert (problem.nodes, problem.pending, tile_rows(problem)) == (8, 8, 16)
    factors = check_verify(setup, inputs)
    (folded,) = problems_of_commit([inputs.state], inputs.slots, [factors], precision)
    assert (folded.nodes, folded.pending) == (16, 16)
    check_commit(setup, inputs, factors, leaves(tree))
