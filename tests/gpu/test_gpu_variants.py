"""Every variant under a few configurations at 128 x 128 and at odd head dims: right, and the same bits in every run."""

from __future__ import annotations

import random

import pytest
import torch
from bole_testing.cases.base import dense_tree, leaves, make_inputs, make_pending, packed_tree, random_parents
from bole_testing.cases.draws import run_draw
from bole_testing.close import assert_same_bits
from bole_testing.gpu_plan import VARIANTS, VariantEntry

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:bole")]


@pytest.mark.parametrize("entry", VARIANTS, ids=str)
def test_against_the_recurrence(entry: VariantEntry) -> None:
    run_draw(entry.setting.setup("cuda"), entry.draw)


@pytest.mark.parametrize("entry", VARIANTS, ids=str)
def test_every_run_gives_the_same_bits(entry: VariantEntry) -> None:
    # More programs than the GPU holds at a time, so that they run in another order each time: a race would show.
    setup, draw = entry.setting.setup("cuda"), entry.draw
    batch, nodes = 256 // draw.heads[1], max(draw.sizes)
    rng = random.Random(5)
    build = packed_tree if draw.packed else dense_tree
    tree = build(setup, [random_parents(rng, nodes) for _ in range(batch)])
    inputs = make_inputs(setup, tree, heads=draw.heads, dims=draw.dims, mode=draw.mode)
    if draw.pending:
        slots = batch + 2
        lengths = [rng.randint(0, draw.pending) for _ in range(slots)]
        starts = [rng.randrange(draw.pending) for _ in range(slots)]
        pending = make_pending(setup, inputs, draw.pending, lengths, starts)
        inputs = inputs.replace(options={"pending": pending})
    accepted = torch.tensor(leaves(tree), dtype=torch.int32, device="cuda")
    first = None
    for _ in range(20):
        out, factors = setup.verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
        pool = inputs.state.clone()
        setup.commit(pool, inputs.slots, factors, accepted, validate=False)
        if first is None:
            first = (out, pool)
            continue
        assert_same_bits("output", out, first[0])
        assert_same_bits("state", pool, first[1])
