"""Random problems: a hypothesis strategy for what to draw, and the check of one draw on any backend."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from bole_runtime.factors import Factors
from bole_testing.cases.base import (
    Setup,
    dense_tree,
    make_inputs,
    make_pending,
    packed_tree,
    random_parents,
)
from bole_testing.cases.checks import check_commit, check_verify


@dataclass(frozen=True)
class Draw:
    """A random problem; ``sizes`` are the nodes of each request, ``pending`` is the capacity of the rings."""

    seed: int
    sizes: tuple[int, ...]
    packed: bool
    heads: tuple[int, int]
    dims: tuple[int, int]
    mode: str
    padding: float
    pending: int
    dead: bool
    capture: bool = False


def draws(
    max_nodes: int = 64,
    max_batch: int = 3,
    *,
    heads: Sequence[tuple[int, int]] = ((2, 4), (1, 3), (1, 1)),
    dims: Sequence[tuple[int, int]] = ((16, 16), (32, 16), (24, 20)),
    modes: Sequence[str] = ("ready", "raw"),
    pending: Sequence[int] = (0, 0, 5),
    capture: Sequence[bool] = (False, True),
    full: bool = False,
) -> st.SearchStrategy[Draw]:
    """Return a strategy of random forests, dense and packed, with padding nodes, padding slots, pending chains and
    capture buffers. With ``full`` the first request always has ``max_nodes``, so that all draws share kernels."""
    sizes = st.lists(st.integers(1, max_nodes), min_size=0 if full else 1, max_size=max_batch - full)
    return st.builds(
        Draw,
        seed=st.integers(0, 2**20),
        sizes=sizes.map(lambda rest: (max_nodes, *rest) if full else tuple(rest)),
        packed=st.booleans(),
        heads=st.sampled_from(heads),
        dims=st.sampled_from(dims),
        mode=st.sampled_from(modes),
        padding=st.sampled_from([0.0, 0.2]),
        pending=st.sampled_from(pending),
        dead=st.booleans(),
        capture=st.sampled_from(capture),
    )


def run_draw(setup: Setup, draw: Draw) -> None:
    """Verify and commit one random problem and compare both with the float64 recurrence."""
    rng = random.Random(draw.seed)
    rows = [random_parents(rng, n, padding=draw.padding) for n in draw.sizes]
    if draw.packed:
        tree = packed_tree(setup, rows, max_nodes=max(draw.sizes) + rng.randrange(3), spare=rng.randrange(3))
    else:
        most = max(draw.sizes)
        tree = dense_tree(setup, [row + [-2] * (most - len(row)) for row in rows])
    batch = len(rows)
    slots = rng.sample(range(batch + 2), batch)
    if draw.dead:
        slots[rng.randrange(batch)] = -1
    inputs = make_inputs(
        setup, tree, heads=draw.heads, dims=draw.dims, mode=draw.mode, slots=slots, pool_slots=batch + 2, seed=draw.seed
    )
    if draw.pending:
        lengths = [rng.randint(0, draw.pending) for _ in range(batch + 2)]
        starts = [rng.randrange(draw.pending) for _ in range(batch + 2)]
        pending = make_pending(setup, inputs, draw.pending, lengths, starts, seed=draw.seed)
        inputs = inputs.replace(options={"pending": pending})
    buffers = None
    if draw.capture:
        buffers = Factors.allocate(
            tree, key_heads=draw.heads[0], value_heads=draw.heads[1], dk=draw.dims[0], dv=draw.dims[1],
            dtype=setup.in_dtype,
        )  # fmt: skip
    factors = check_verify(setup, inputs, capture=buffers)
    live = [[i for i, p in enumerate(row) if p != -2] for row in rows]
    check_commit(setup, inputs, factors, [rng.choice([-1, *nodes, *nodes]) for nodes in live])
