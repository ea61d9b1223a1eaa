"""A pending chain above a request whose first nodes are padding, in every family and way to verify, interpreted.

Kernels read rows of a request also where a row is of the chain: whatever memory the first node has must not matter.
"""

from __future__ import annotations

import pytest
import torch
from bole_testing.cases.base import dense_tree, packed_tree
from bole_testing.cases.checks import check_commit, check_verify
from bole_testing.families import family_inputs, family_pending
from bole_testing.pins import Pin, pin, pinned_setup

from bole_runtime.families import KERNEL_FAMILIES, get_family

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]

FP32, FP16 = torch.float32, torch.float16
ROWS = [[-2, -1, 1, 2, -2, 1], [-2, -2, -1, -1, 2, 3], [-1, 0, 0, 1, -2, -2]]
STEPS = {"variant": "steps"}
SCALAR = (
    pin("fused", bv=16, commit=STEPS),
    pin("fused", bv=16, orient="state", commit=STEPS),
    pin("two_stage", bv=16, commit=STEPS),
    pin("two_stage", bv=16, orient="state", share=True, commit=STEPS),
    pin("two_stage", bv=16, programs=128, commit=STEPS),
    pin("chunked", chunk=16, bv=16, commit=STEPS),
)
ERASING = (
    pin("fused", bv=16, stack=False, commit=STEPS),
    pin("two_stage", bv=16, gather="together", commit=STEPS),
    pin("two_stage", bv=16, gather="apart", solve="fp32", commit=STEPS),
    pin("two_stage", bv=16, commit={"variant": "path"}),
)
CHANNEL = (
    pin("slices", bv=16, commit=STEPS),
    pin("two_stage_slices", bv=16, commit=STEPS),
    pin("two_stage_slices", bv=16, halves=True, slice=16, prepare_warps=1, commit=STEPS),
)
#: Of more rows than others take: a chain of up to 40.
BLOCKS = pin("three_stage_blocks", bv=16, row_block=16, slice=16, prepare_warps=1, commit=STEPS)


def _calls() -> list[object]:
    found = []
    for name in KERNEL_FAMILIES:
        spec = get_family(name)
        pins = (CHANNEL if spec.plain else CHANNEL[:1]) if spec.decay == "channel" else SCALAR
        if not spec.plain and spec.decay != "channel":
            pins = CHANNEL[:1]
        elif spec.plain and spec.decay != "channel" and spec.erase != "none":
            pins += ERASING
        if spec.decay == "channel" or not spec.plain:
            pins += (BLOCKS,)
        found += [pytest.param(name, p, id=f"{name}-{p}") for p in pins]
    return found


@pytest.mark.parametrize(("name", "pinned"), _calls())
def test_first_nodes_that_are_padding(name: str, pinned: Pin) -> None:
    spec, packed = get_family(name), len(str(pinned)) % 2 == 0
    halves = dict(pinned.changes).get("halves", False)
    setup = pinned_setup(pinned, "cpu", FP32, FP32, "lossless")
    tree = packed_tree(setup, ROWS) if packed else dense_tree(setup, ROWS)
    mode = "raw" if "raw" in spec.modes else "ready"
    capacity = 40 if pinned == BLOCKS else 16 if halves else 6
    lengths = [37, 0, 40, 3] if pinned == BLOCKS else [5, 0, 6, 3]
    inputs = family_inputs(
        setup, spec, tree, heads=(1, 2), dims=(32, 16) if halves else (20, 16), mode=mode, slots=[2, 0, 3],
        pool_slots=4,
    )  # fmt: skip
    chain = family_pending(setup, spec, mode, inputs, capacity, lengths, [4, 0, 2, 5])
    inputs = inputs.replace(options={**inputs.options, "pending": chain})
    check_commit(setup, inputs, check_verify(setup, inputs), [3, 5, 1])
