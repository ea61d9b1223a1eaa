"""State cases: padding slots, nothing accepted, paths that skip nodes, rounds, pending chains, captured factors,
layers."""

from __future__ import annotations

import random

import torch

from bole_runtime.factors import Factors
from bole_runtime.reference import commit_sequential
from bole_testing.cases.base import (
    NAN,
    Case,
    Setup,
    case,
    chain_tree,
    dense_tree,
    leaves,
    make_inputs,
    make_pending,
    packed_tree,
    random_parents,
)
from bole_testing.cases.checks import check_commit, check_verify
from bole_testing.close import assert_close, assert_same_bits, relative_norm

CASES: list[Case] = []


@case(CASES)
def padding_slots(setup: Setup) -> None:
    # NaN in the inputs of the padding rows and in every unused slot: only slot 2 changes.
    inputs = make_inputs(setup, dense_tree(setup, [[-1, 0, 0, 1]] * 3), slots=[2, -1, -1], pool_slots=4)
    factors = check_verify(setup, inputs)
    check_commit(setup, inputs, factors, [3, 3, 3])


@case(CASES)
def only_padding_slots(setup: Setup) -> None:
    inputs = make_inputs(setup, dense_tree(setup, [[-1, 0, 0, 1]] * 2), slots=[-1, -1], pool_slots=2)
    check_commit(setup, inputs, check_verify(setup, inputs), [3, 3])


@case(CASES)
def nothing_accepted(setup: Setup) -> None:
    inputs = make_inputs(setup, dense_tree(setup, [[-1, 0, 0, 1, 3]] * 3))
    factors = check_verify(setup, inputs)
    for accepted in ([-1, 0, 4], [-1, -1, -1], [4, -1, -1]):
        check_commit(setup, inputs, factors, accepted)


@case(CASES)
def path_skips_nodes(setup: Setup) -> None:
    # Accepting node 4 commits 0, 2, 4 and not 0, 1, 2.
    tree = dense_tree(setup, [[-1, 0, 0, 1, 2]])
    inputs = make_inputs(setup, tree)
    assert tree.path(0, 4) == [0, 2, 4]
    pool = check_commit(setup, inputs, check_verify(setup, inputs), [4])
    pick = torch.tensor([0, 2, 4], device=setup.device)
    chain = inputs.replace(
        q=inputs.q[:, pick],
        k=inputs.k[:, pick],
        v=inputs.v[:, pick],
        gates={name: t[:, pick] for name, t in inputs.gates.items()},
        tree=chain_tree(setup, 1, 3),
    )
    same = check_commit(setup, chain, check_verify(setup, chain), [2])
    slot = int(inputs.slots[0])
    assert_close("path as a chain", pool[slot], same[slot], 2 * setup.state_bound)


@case(CASES)
def several_roots(setup: Setup) -> None:
    inputs = make_inputs(setup, dense_tree(setup, [[-1, -1, 0, 1, -1, 4]]))
    factors = check_verify(setup, inputs)
    for node in range(6):
        check_commit(setup, inputs, factors, [node])


@case(CASES)
def two_rounds_equal_plain_decoding(setup: Setup) -> None:
    # Round 1 accepts 3 of 8 tokens, round 2 is a single node: the state is that of 4 plain steps.
    first = make_inputs(setup, dense_tree(setup, [[-1, 0, 0, 1, 2, 2, 4, 4]]), seed=1)
    second = make_inputs(setup, chain_tree(setup, 1, 1), slots=first.slots.tolist(), pool_slots=3, seed=2)
    pool = check_commit(setup, first, check_verify(setup, first), [4])
    second = second.replace(state=pool)
    pool = check_commit(setup, second, check_verify(setup, second), [0])
    pick = torch.tensor([0, 2, 4], device=setup.device)

    def joined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat((a[:, pick], b), 1)

    plain = first.replace(
        q=joined(first.q, second.q),
        k=joined(first.k, second.k),
        v=joined(first.v, second.v),
        gates={name: joined(t, second.gates[name]) for name, t in first.gates.items()},
        tree=chain_tree(setup, 1, 4),
    )
    factors = check_verify(setup, plain)
    ref = commit_sequential(plain.state, plain.slots, factors, torch.tensor([3]))
    assert_close("two rounds", pool[first.slots.long()], ref, 2 * setup.state_bound)


def _rounds(setup: Setup, dims: tuple[int, int]) -> None:
    if setup.state_dtype is not torch.float32:
        return  # such a state adds its own rounding each round
    rng = random.Random(11)
    tree = dense_tree(setup, [[-1] * 8])
    inputs = make_inputs(setup, tree, heads=(1, 2), dims=dims, slots=[0], pool_slots=1)
    pool, single, exact = inputs.state.clone(), inputs.state.clone(), inputs.state.double()
    for n in range(64):
        parents = random_parents(rng, 8)
        tree.update_(torch.tensor([parents], device=setup.device))
        step = make_inputs(setup, tree, heads=(1, 2), dims=dims, slots=[0], pool_slots=1, seed=100 + n)
        step = step.replace(state=pool)
        factors = check_verify(setup, step)
        accepted = torch.tensor([rng.choice([-1, 3, 5, 7])], dtype=torch.int32, device=setup.device)
        setup.commit(pool, step.slots, factors, accepted, precision=setup.precision)
        single = commit_sequential(single, step.slots, factors, accepted, dtype=torch.float32)
        exact = commit_sequential(exact, step.slots, factors, accepted)
    drift, allowed = relative_norm(pool, exact), 2 * relative_norm(single, exact)
    if setup.precision == "lossless":
        assert drift <= allowed, f"drift {drift:.3g} after 64 rounds, twice the fp32 recurrence's is {allowed:.3g}"
    else:
        assert_close("64 rounds", pool, exact, 10 * setup.state_bound)


@case(CASES, cost="medium")
def sixty_four_rounds_do_not_drift(setup: Setup) -> None:
    _rounds(setup, (16, 16))


@case(CASES, cost="large")
def sixty_four_rounds_of_wide_heads_do_not_drift(setup: Setup) -> None:
    _rounds(setup, (128, 128))


@case(CASES)
def topology_changes_in_place(setup: Setup) -> None:
    for build in (dense_tree, packed_tree):
        tree = build(setup, [[-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0]])
        for rows in ([[-1, 0, 0, 1, 2], [-1, -1, 1, 2, -2]], [[-1, -2, -2, -2, -2], [-1, 0, 1, 2, 3]]):
            new = torch.tensor(rows, device=setup.device)
            tree.update_(new.flatten() if tree.is_packed else new)
            inputs = make_inputs(setup, tree, dims=(16, 16))
            check_commit(setup, inputs, check_verify(setup, inputs), leaves(tree))


@case(CASES)
def accepted_padding_without_validation_changes_nothing(setup: Setup) -> None:
    inputs = make_inputs(setup, dense_tree(setup, [[-1, 0, -2, 1]] * 2))
    factors = check_verify(setup, inputs)
    for bad in (2, 4, 77, -5):
        pool = inputs.state.clone()
        accepted = torch.tensor([bad, bad], dtype=torch.int32, device=setup.device)
        setup.commit(pool, inputs.slots, factors, accepted, precision=setup.precision, validate=False)
        assert_same_bits(f"accepted = {bad}", pool, inputs.state)


@case(CASES)
def negative_slots_without_validation_are_padding(setup: Setup) -> None:
    inputs = make_inputs(setup, dense_tree(setup, [[-1, 0, 1]] * 3))
    slots = inputs.slots.clone()
    slots[0], slots[2] = -3, -(2**31)
    out, factors = setup.verify(
        inputs.q, inputs.k, inputs.v, **{**inputs.arguments, "slots": slots}, validate=False, precision=setup.precision
    )
    assert bool((out[[0, 2]] == 0).all())
    assert bool((out[1] != 0).any())
    pool = inputs.state.clone()
    accepted = torch.full((3,), 2, dtype=torch.int32, device=setup.device)
    setup.commit(pool, slots, factors, accepted, precision=setup.precision, validate=False)
    others = [s for s in range(pool.shape[0]) if s != int(slots[1])]
    assert_same_bits("other slots", pool[others], inputs.state[others])


def _pending(setup: Setup, packed: bool, mode: str) -> None:
    rows = [[-1, 0, 0, 1, 2], [-1, -1, 1, 2, 3], [-1, 0, 1, 1, 3]]
    tree = packed_tree(setup, rows) if packed else dense_tree(setup, rows)
    inputs = make_inputs(setup, tree, slots=[3, 0, -1] if not packed else [3, 0, 1], pool_slots=5, mode=mode)
    pending = make_pending(setup, inputs, 6, lengths=[0, 6, 0, 4, 2], starts=[0, 5, 3, 4, 0])
    inputs = inputs.replace(options={"pending": pending})
    factors = check_verify(setup, inputs)
    assert factors.pending is pending
    for accepted in ([4, -1, -1], [0, 3, 4]):
        check_commit(setup, inputs, factors, accepted)


@case(CASES)
def pending_chain_dense(setup: Setup) -> None:
    _pending(setup, False, "ready")


@case(CASES)
def pending_chain_packed(setup: Setup) -> None:
    _pending(setup, True, "ready")


@case(CASES)
def pending_chain_raw_gates(setup: Setup) -> None:
    _pending(setup, False, "raw")


@case(CASES)
def pending_chain_above_padding(setup: Setup) -> None:
    # The first node of a request may be none, its memory full of NaN.
    rows = [[-2, -1, 1, 2, 1], [-2, -2, -1, 2, 3], [-1, 0, -2, 1, 3]]
    for tree in (dense_tree(setup, rows), packed_tree(setup, rows)):
        inputs = make_inputs(setup, tree, slots=[3, 0, 1], pool_slots=4, mode="raw")
        pending = make_pending(setup, inputs, 6, lengths=[1, 6, 0, 4], starts=[0, 5, 3, 4])
        inputs = inputs.replace(options={"pending": pending})
        check_commit(setup, inputs, check_verify(setup, inputs), [3, 4, 3])


@case(CASES)
def pending_chain_equals_committed_tokens(setup: Setup) -> None:
    # Tokens left pending give the outputs that they give once they are in the state.
    chain = make_inputs(setup, chain_tree(setup, 1, 4), slots=[0], pool_slots=1, seed=4)
    after = make_inputs(setup, dense_tree(setup, [[-1, 0, 0]]), slots=[0], pool_slots=1, seed=5)
    committed = check_commit(setup, chain, check_verify(setup, chain), [3])
    direct, _ = setup.verify(
        after.q, after.k, after.v, out_dtype=torch.float32, precision=setup.precision,
        **{**after.arguments, "state": committed},
    )  # fmt: skip
    pending = make_pending(setup, chain, 8, lengths=[4], starts=[6])
    rows = (torch.arange(4) + 6) % 8
    pending.k[0, rows], pending.v[0, rows] = chain.k[0], chain.v[0]
    for name, gate in pending.gates.items():
        gate[0, rows] = chain.gates[name][0]
    deferred, _ = setup.verify(
        after.q, after.k, after.v, out_dtype=torch.float32, precision=setup.precision, pending=pending,
        **{**after.arguments, "state": chain.state},
    )  # fmt: skip
    if setup.state_dtype is torch.float32:
        assert_close("deferred", deferred, direct, 2 * setup.output_bound)


def _captured(setup: Setup, mode: str, packed: bool) -> None:
    rows = [[-1, 0, 0, 1], [-1, 0, 1, 2]]
    tree = packed_tree(setup, rows) if packed else dense_tree(setup, rows)
    inputs = make_inputs(setup, tree, heads=(2, 4), dims=(16, 24), mode=mode)
    buffers = Factors.allocate(
        tree, key_heads=2, value_heads=4, dk=16, dv=24, dtype=setup.in_dtype, device=setup.device
    )
    inputs = inputs.replace(options={"factors": buffers})
    plain = inputs.replace(options={})
    expected = check_commit(setup, plain, check_verify(setup, plain), [3, 2])
    _, factors = setup.verify(inputs.q, inputs.k, inputs.v, precision=setup.precision, **inputs.arguments)
    assert factors.k.data_ptr() == buffers.k.data_ptr()
    assert factors.gate_mode == "ready"
    for t in (inputs.q, inputs.k, inputs.v, *inputs.gates.values()):
        t.fill_(NAN)  # captured factors do not need the inputs any more
    pool = inputs.state.clone()
    accepted = torch.tensor([3, 2], dtype=torch.int32, device=setup.device)
    setup.commit(pool, inputs.slots, factors, accepted, precision=setup.precision)
    live = inputs.slots.long()
    assert_close("captured", pool[live], expected[live], 2 * setup.state_bound)


@case(CASES)
def captured_ready_gates(setup: Setup) -> None:
    _captured(setup, "ready", False)


@case(CASES)
def captured_raw_gates(setup: Setup) -> None:
    _captured(setup, "raw", False)


@case(CASES)
def captured_packed(setup: Setup) -> None:
    _captured(setup, "raw", True)


@case(CASES)
def a_ring_filled_from_captured_factors(setup: Setup) -> None:
    # Raw gates in the call, ready ones in its buffers and in the ring: a deferred commit equals two commits.
    tree, slots = dense_tree(setup, [[-1, 0, 0, 1], [-1, 0, 1, 2]]), [2, 0]
    first, second = (make_inputs(setup, tree, mode="raw", slots=slots, pool_slots=3, seed=n) for n in (1, 2))
    first.gates["beta_scale"] = second.gates["beta_scale"] = 2.0
    buffers = Factors.allocate(
        tree, key_heads=2, value_heads=4, dk=32, dv=32, dtype=setup.in_dtype, device=setup.device
    )
    _, factors = setup.verify(first.q, first.k, first.v, factors=buffers, precision=setup.precision, **first.arguments)
    pool = check_commit(setup, first, factors, [3, 1])
    pending = make_pending(setup, first, 4, lengths=[2, 0, 3], starts=[3, 1, 2])
    for b, (slot, path) in enumerate(zip(slots, ([0, 1, 3], [0, 1]), strict=True)):
        rows = [(int(pending.start[slot]) + t) % 4 for t in range(len(path))]
        pending.k[slot, rows], pending.v[slot, rows] = factors.k[b, path], factors.v[b, path]
        for name, gate in pending.gates.items():
            gate[slot, rows] = factors.gates[name][b, path]
    deferred = second.replace(state=first.state, options={"pending": pending})
    late = check_commit(setup, deferred, check_verify(setup, deferred), [2, 3])
    if setup.state_dtype is torch.float32:
        direct = second.replace(state=pool)
        soon = check_commit(setup, direct, check_verify(setup, direct), [2, 3])
        assert_close("deferred", late[slots], soon[slots], 2 * setup.state_bound)


@case(CASES)
def several_layers_in_one_commit(setup: Setup) -> None:
    tree = dense_tree(setup, [[-1, 0, 0, 1], [-1, 0, 1, 2]])
    layers = [make_inputs(setup, tree, slots=[1, 2], pool_slots=3, seed=n) for n in range(3)]
    layers.append(make_inputs(setup, tree, slots=[1, 2], pool_slots=3, seed=9, heads=(1, 2), dims=(16, 16)))
    factors = [check_verify(setup, layer) for layer in layers]
    expected = [check_commit(setup, layer, f, [3, -1]) for layer, f in zip(layers, factors, strict=True)]
    pools = [layer.state.clone() for layer in layers]
    accepted = torch.tensor([3, -1], device=setup.device)
    setup.commit(pools, layers[0].slots, factors, accepted, precision=setup.precision)
    for n, (pool, ref) in enumerate(zip(pools, expected, strict=True)):
        assert_same_bits(f"layer {n}", pool, ref)
