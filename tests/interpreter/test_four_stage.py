"""What four_stage has of its own: heads solved with their decays inside and shared products beside them, strong gates,
rows too large to square, keys that are not normalised, trees that end in any row block."""

from __future__ import annotations

import random

import pytest
import torch
from bole_testing.cases.base import chain_tree, dense_tree, make_inputs, packed_tree, random_parents
from bole_testing.cases.checks import check_verify
from bole_testing.families import family_inputs, family_pending
from bole_testing.pins import pin, pinned_setup

from bole_runtime import get_family

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu"), pytest.mark.slow]

FP32, FP16 = torch.float32, torch.float16
SMALL = {"heads": (1, 2), "dims": (16, 16)}


@pytest.mark.parametrize(("beta", "g", "unroll"), [(4.0, -2.0, 4), (-2.0, -2.0, 1), (2.5, -1.0, 2)])
def test_betas_that_only_decays_tame(beta: float, g: float, unroll: int) -> None:
    # One key in every node: values grow by |1 - beta| a node before decays, to far beyond fp32. The other head shares.
    setup = pinned_setup(pin("four_stage", unroll=unroll), "cpu", FP32, FP32, "lossless")
    inputs = make_inputs(setup, chain_tree(setup, 1, 150), **SMALL)
    inputs.k.copy_(inputs.k[:, :1].clone().expand_as(inputs.k))
    inputs.gates["beta"].fill_(beta)
    inputs.gates["beta"][:, :, 1] = 0.5
    inputs.gates["g"].fill_(g)
    check_verify(setup, inputs, sequential=True)


@pytest.mark.parametrize(
    ("beta", "g", "precision"),
    [(1.97, 0.0, "lossless"), (2.0, -0.05, "lossless"), (1.99, 0.0, "fast")],
)
def test_one_key_in_every_node(beta: float, g: float, precision: str) -> None:
    setup = pinned_setup(pin("four_stage"), "cpu", FP16, FP32, precision)
    inputs = make_inputs(setup, chain_tree(setup, 1, 200), **SMALL)
    inputs.k.copy_(inputs.k[:, :1].clone().expand_as(inputs.k))
    inputs.gates["beta"].fill_(beta)
    inputs.gates["g"].fill_(g)
    check_verify(setup, inputs)


def test_one_huge_log_decay_above_a_chain() -> None:
    setup = pinned_setup(pin("four_stage"), "cpu", FP32, FP32, "lossless")
    inputs = make_inputs(setup, chain_tree(setup, 1, 140), **SMALL)
    inputs.gates["g"][:, 3] = -1000.0
    inputs.gates["g"][:, 60:100] = -300.25
    check_verify(setup, inputs)


@pytest.mark.parametrize("where", [0, 128])
def test_rows_too_large_to_square(where: int) -> None:
    setup = pinned_setup(pin("four_stage"), "cpu", FP32, FP32, "lossless")
    inputs = make_inputs(setup, chain_tree(setup, 1, 129), **SMALL)
    for x in (inputs.q, inputs.k):
        x[:, where] *= 1e25
    check_verify(setup, inputs)


@pytest.mark.parametrize("family", ["gdn", "deltanet"])
def test_keys_that_are_not_normalised(family: str) -> None:
    setup = pinned_setup(pin("four_stage"), "cpu", FP32, FP32, "lossless")
    rng = random.Random(5)
    tree = dense_tree(setup, [random_parents(rng, 131, padding=0.1) for _ in range(2)])
    inputs = family_inputs(setup, get_family(family), tree, heads=(1, 2), dims=(16, 16), slots=[1, 2], pool_slots=3)
    inputs.k.mul_(0.2)
    check_verify(setup, inputs.replace(options={**inputs.options, "qk_l2norm": False}), sequential=True)


@pytest.mark.parametrize("family", ["gdn", "lightning"])
def test_first_nodes_that_are_padding(family: str) -> None:
    # Rows of the chain read queries of nodes; those may be NaN. The second request has no nodes at all.
    setup = pinned_setup(pin("four_stage"), "cpu", FP32, FP32, "lossless")
    rows = [[-2, -2, *random_parents(random.Random(7), 120)], [], [-1, 0, 0, 1, -2, -2]]
    rows[0][2:] = [p + 2 if p >= 0 else p for p in rows[0][2:]]
    spec, tree = get_family(family), packed_tree(setup, rows)
    inputs = family_inputs(setup, spec, tree, heads=(1, 2), dims=(16, 16), slots=[2, 0, 3], pool_slots=4)
    chain = family_pending(setup, spec, "ready", inputs, 12, [12, 5, 0, 6], [4, 0, 2, 5])
    check_verify(setup, inputs.replace(options={**inputs.options, "pending": chain}))


@pytest.mark.parametrize("nodes", [120, 160, 161, 256, 300])
def test_trees_of_any_number_of_blocks(nodes: int) -> None:
    precision = "fast" if nodes > 256 else "lossless"
    setup = pinned_setup(pin("four_stage", unroll=2), "cpu", FP16, FP32, precision)
    tree = packed_tree(setup, [random_parents(random.Random(nodes), nodes), random_parents(random.Random(1), 3)])
    check_verify(setup, make_inputs(setup, tree, **SMALL, mode="raw"))
