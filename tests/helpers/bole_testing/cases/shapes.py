"""Shape and index cases: sizes no tile divides, head pairings, layouts, strides, index dtypes, large batches."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from bole_testing.cases.base import (
    Case,
    Inputs,
    Setup,
    case,
    chain_tree,
    dense_tree,
    leaves,
    make_inputs,
    packed_tree,
    random_parents,
)
from bole_testing.cases.checks import check_commit, check_verify
from bole_testing.close import assert_close, assert_same_bits

CASES: list[Case] = []


def _both(setup: Setup, inputs: Inputs) -> None:
    factors = check_verify(setup, inputs)
    check_commit(setup, inputs, factors, leaves(inputs.tree))


def _nodes(nodes: int) -> Callable[[Setup], None]:
    def body(setup: Setup) -> None:
        rng = random.Random(nodes)
        _both(setup, make_inputs(setup, dense_tree(setup, [random_parents(rng, nodes)]), heads=(1, 2)))

    return body


for _n in (1, 2, 9, 17, 33, 63, 100, 129, 200, 512):
    # A power of two and its neighbours, the sizes of common draft budgets, and the capacity.
    CASES.append(Case(f"nodes_{_n}", _nodes(_n), cost="small" if _n <= 33 else "medium"))


def _dims(dk: int, dv: int) -> Callable[[Setup], None]:
    def body(setup: Setup) -> None:
        inputs = make_inputs(setup, dense_tree(setup, [[-1, 0, 0, 1, 2]]), heads=(1, 2), dims=(dk, dv))
        _both(setup, inputs)
        # The last dimensions are really read: changing only them changes the result.
        base, _ = setup.verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
        for t in (inputs.q, inputs.k, inputs.v, inputs.state[int(inputs.slots[0])]):
            kept = t[..., -1].clone()
            t[..., -1] += 1
            other, _ = setup.verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
            assert not torch.equal(base, other)
            t[..., -1] = kept

    return body


for _dk, _dv in ((48, 64), (64, 48), (96, 100), (100, 96), (128, 128), (192, 128), (128, 256), (256, 64), (16, 16)):
    CASES.append(Case(f"dims_{_dk}_{_dv}", _dims(_dk, _dv), cost="small" if _dk * _dv <= 16384 else "medium"))


def _heads(key_heads: int, value_heads: int) -> Callable[[Setup], None]:
    def body(setup: Setup) -> None:
        tree = dense_tree(setup, [[-1, 0, 0, 1], [-1, -1, 1, -2]])
        _both(setup, make_inputs(setup, tree, heads=(key_heads, value_heads), dims=(16, 16)))

    return body


for _hk, _hv in ((16, 32), (16, 48), (2, 4), (1, 3), (1, 1)):
    CASES.append(Case(f"heads_{_hk}_{_hv}", _heads(_hk, _hv), cost="small" if _hv <= 4 else "medium"))


@case(CASES)
def one_hot_query_head(setup: Setup) -> None:
    # Value head h reads key head h // (HV // HK): only its own group answers a query.
    for head in (0, 1):
        inputs = make_inputs(setup, chain_tree(setup, 1, 4), heads=(2, 6), dims=(16, 16))
        inputs.q[:, :, 1 - head] = 0
        out, _ = setup.verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
        answered = out.float().abs().sum((0, 1, 3)) > 0
        assert answered.tolist() == [h // 3 == head for h in range(6)]


@case(CASES)
def empty_batch(setup: Setup) -> None:
    for tree in (dense_tree_of_none(setup), packed_tree(setup, [], max_nodes=3)):
        inputs = make_inputs(setup, tree)
        out, factors = setup.verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
        assert out.shape == inputs.v.shape
        setup.commit(inputs.state, inputs.slots, factors, inputs.slots)


def dense_tree_of_none(setup: Setup) -> object:
    """Return a dense tree of no requests with room for three nodes each."""
    from bole_runtime.tree import TreeBatch

    return TreeBatch.from_parents(torch.zeros(0, 3, dtype=torch.int32, device=setup.device))


@case(CASES)
def packed_trees_of_different_sizes(setup: Setup) -> None:
    rng = random.Random(5)
    rows = [random_parents(rng, n, padding=0.1) for n in (7, 1, 0, 18, 33)]
    inputs = make_inputs(setup, packed_tree(setup, rows, max_nodes=40, spare=3), slots=[4, 0, 3, -1, 6], pool_slots=8)
    out, factors = setup.verify(
        inputs.q, inputs.k, inputs.v, precision=setup.precision, out_dtype=torch.float32, **inputs.arguments
    )
    ends = inputs.tree.offsets.tolist()
    # The rows of a padding slot are padding whatever the tree says, in the packed layout too.
    assert bool((out[ends[3] : ends[4]] == 0).all())
    live = inputs.live.clone()
    live[ends[3] : ends[4]] = False
    from bole_runtime.reference import verify_sequential

    ref = verify_sequential(inputs.q, inputs.k, inputs.v, **inputs.arguments)
    assert_close("output", out[live], ref[live], setup.output_bound)
    check_commit(setup, inputs, factors, [6, 0, -1, -1, leaves(inputs.tree)[4]])


@case(CASES)
def dense_and_packed_agree(setup: Setup) -> None:
    rng = random.Random(6)
    rows = [random_parents(rng, 9) for _ in range(3)]
    dense = make_inputs(setup, dense_tree(setup, rows))
    packed = dense.replace(
        q=dense.q.flatten(0, 1),
        k=dense.k.flatten(0, 1),
        v=dense.v.flatten(0, 1),
        gates={name: t.flatten(0, 1) for name, t in dense.gates.items()},
        tree=packed_tree(setup, rows),
    )
    a, _ = setup.verify(dense.q, dense.k, dense.v, precision=setup.precision, **dense.arguments)
    b, _ = setup.verify(packed.q, packed.k, packed.v, precision=setup.precision, **packed.arguments)
    assert_same_bits("packed", b, a.flatten(0, 1))


@case(CASES)
def slices_of_a_packed_qkv(setup: Setup) -> None:
    tree = dense_tree(setup, [[-1, 0, 0, 2, 3], [-1, 0, 1, 1, -2]])
    inputs = make_inputs(setup, tree, heads=(2, 4), dims=(16, 24))
    flat = torch.cat([inputs.q.flatten(2), inputs.k.flatten(2), inputs.v.flatten(2)], -1)
    q, k, v = flat.split([32, 32, 96], -1)
    views = inputs.replace(q=q.unflatten(-1, (2, 16)), k=k.unflatten(-1, (2, 16)), v=v.unflatten(-1, (4, 24)))
    a, factors = setup.verify(inputs.q, inputs.k, inputs.v, precision=setup.precision, **inputs.arguments)
    b, view_factors = setup.verify(views.q, views.k, views.v, precision=setup.precision, **views.arguments)
    assert_same_bits("packed qkv", b, a)
    pools = [check_commit(setup, inputs, f, [4, 3]) for f in (factors, view_factors)]
    assert_same_bits("state", pools[1], pools[0])


@case(CASES)
def transposed_strides(setup: Setup) -> None:
    # Heads outside nodes, and gates and a pool with strides of their own.
    inputs = make_inputs(setup, dense_tree(setup, [[-1, 0, 0, 2, 3]] * 2), heads=(2, 4), dims=(16, 24))

    def moved(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def widened(t: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(*t.shape[:-1], t.shape[-1] + 5, dtype=t.dtype, device=t.device)
        wide[..., : t.shape[-1]] = t
        return wide[..., : t.shape[-1]]

    views = inputs.replace(
        q=moved(inputs.q),
        k=moved(inputs.k),
        v=moved(inputs.v),
        gates={name: widened(t) for name, t in inputs.gates.items()},
        state=inputs.state.repeat_interleave(2, 0)[::2],
    )
    a, _ = setup.verify(inputs.q, inputs.k, inputs.v, precision=setup.precision, **inputs.arguments)
    out = moved(torch.empty_like(a))
    b, factors = setup.verify(views.q, views.k, views.v, precision=setup.precision, out=out, **views.arguments)
    assert b is out
    assert_same_bits("strided", b, a)
    pool = check_commit(setup, inputs, factors, [4, 3])
    setup.commit(
        views.state, views.slots, factors, torch.tensor([4, 3], device=setup.device), precision=setup.precision
    )
    assert_same_bits("state", views.state, pool)


@case(CASES)
def index_dtypes_and_strides(setup: Setup) -> None:
    inputs = make_inputs(setup, dense_tree(setup, [[-1, 0, 0]] * 3), dims=(16, 16))
    a, factors = setup.verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
    accepted = torch.tensor([2, -1, 1], device=setup.device)
    pool = check_commit(setup, inputs, factors, accepted.tolist())
    for dtype in (torch.int32, torch.int64):
        spread = torch.full((6,), -7, dtype=dtype, device=setup.device)
        spread[::2] = inputs.slots.to(dtype)
        nodes = torch.full((6,), 99, dtype=dtype, device=setup.device)
        nodes[::2] = accepted.to(dtype)
        other = inputs.replace(slots=spread[::2])
        b, f = setup.verify(other.q, other.k, other.v, **other.arguments)
        assert_same_bits(f"slots {dtype}", b, a)
        again = inputs.state.clone()
        setup.commit(again, spread[::2], f, nodes[::2], precision=setup.precision)
        assert_same_bits(f"accepted {dtype}", again, pool)


@case(CASES)
def element_types_of_gates(setup: Setup) -> None:
    # Whatever gates are given in, verify and commit take them, one layer and several.
    tree = dense_tree(setup, [[-1, 0, 0, 1]])
    for dtype in (torch.bfloat16, torch.float64):
        inputs = make_inputs(setup, tree, heads=(1, 2), mode="raw")
        gates = {name: t.to(dtype) for name, t in inputs.gates.items()}
        inputs = inputs.replace(gates=gates)
        factors = check_verify(setup, inputs)
        pool = check_commit(setup, inputs, factors, [3])
        pools = [inputs.state.clone() for _ in range(2)]
        accepted = torch.tensor([3], dtype=torch.int32, device=setup.device)
        setup.commit(pools, inputs.slots, [factors, factors], accepted, precision=setup.precision)
        for other in pools:
            assert_same_bits("layers", other, pool)


@case(CASES)
def duplicate_slots_are_legal_in_verify(setup: Setup) -> None:
    inputs = make_inputs(setup, dense_tree(setup, [[-1, 0, 0], [-1, 0, 1]]), slots=[2, 2], pool_slots=3)
    check_verify(setup, inputs)


@case(CASES, cost="large")
def more_value_heads_than_a_grid_dimension(setup: Setup) -> None:
    # B * HV = 65,552: equal, bit for bit, to two half batches.
    batch = 4097
    tree = chain_tree(setup, batch, 2)
    inputs = make_inputs(setup, tree, heads=(16, 16), dims=(16, 16), slots=list(range(batch)), pool_slots=batch)
    a, factors = setup.verify(inputs.q, inputs.k, inputs.v, precision=setup.precision, **inputs.arguments)
    pool = inputs.state.clone()
    accepted = torch.ones(batch, dtype=torch.int32, device=setup.device)
    setup.commit(pool, inputs.slots, factors, accepted, precision=setup.precision)
    halves = inputs.state.clone()
    for part in (slice(0, 2048), slice(2048, batch)):
        count = part.stop - part.start
        half = inputs.replace(
            q=inputs.q[part],
            k=inputs.k[part],
            v=inputs.v[part],
            gates={name: t[part] for name, t in inputs.gates.items()},
            slots=inputs.slots[part],
            tree=chain_tree(setup, count, 2),
        )
        b, f = setup.verify(half.q, half.k, half.v, precision=setup.precision, **half.arguments)
        assert_close("half", b, a[part], 0.0 if setup.precision == "lossless" else setup.output_bound)
        setup.commit(halves, half.slots, f, accepted[part], precision=setup.precision)
    assert_close("state", halves, pool, setup.state_bound)


@case(CASES, cost="large")
def slot_beyond_two_billion_elements(setup: Setup) -> None:
    # Slots of 128 * 128 * 32 elements: slot 4100 starts beyond 2^31 elements.
    tree = chain_tree(setup, 1, 4)
    inputs = make_inputs(setup, tree, heads=(16, 32), dims=(128, 128), slots=[1], pool_slots=2)
    pool = torch.empty(4101, 32, 128, 128, dtype=setup.state_dtype, device=setup.device)
    pool[1] = inputs.state[1]
    pool[4100] = inputs.state[1]
    accepted = torch.tensor([3], dtype=torch.int32, device=setup.device)
    results = []
    for slot in (1, 4100):
        at = inputs.replace(state=pool, slots=torch.tensor([slot], dtype=torch.int32, device=setup.device))
        out, factors = setup.verify(at.q, at.k, at.v, precision=setup.precision, **at.arguments)
        setup.commit(pool, at.slots, factors, accepted, precision=setup.precision)
        results.append((out, pool[slot].clone()))
    assert_same_bits("output", results[1][0], results[0][0])
    assert_same_bits("state", results[1][1], results[0][1])
