"""Commits whose rows do different things: commit, flush, append or nothing, against the float64 recurrence."""

from __future__ import annotations

import random

import torch

from bole_runtime import Config, TreeBatch, get_family
from bole_runtime.backends import get_backend
from bole_runtime.calls import CommitCall, CommitLayer, RowAction
from bole_runtime.factors import Factors, PendingChain, kept_gates
from bole_runtime.reference import commit_sequential, flush_sequential
from bole_testing.cases.base import Inputs, Setup, dense_tree, make_inputs, make_pending, packed_tree, random_parents
from bole_testing.close import assert_close, assert_same_bits
from bole_testing.families import family_inputs, family_pending

SLOTS = 7


def _factors(inputs: Inputs, pending: PendingChain, gate_mode: str) -> Factors:
    gates = {name: t for name, t in inputs.gates.items() if isinstance(t, torch.Tensor)}
    spec = get_family(inputs.options.get("recurrence", "gdn"))
    options = {i.name: float(i.default or 0.0) for i in spec.options(gate_mode) if i.name != "beta_scale"}
    return Factors(
        spec, gate_mode, inputs.k, inputs.v, gates, 1.0, spec.qk_l2norm, inputs.tree, pending, options=options
    )  # fmt: skip


def _inputs(
    setup: Setup, family: str, tree: TreeBatch, slots: list[int], mode: str, seed: int, without: tuple[str, ...]
) -> Inputs:
    if family == "gdn":
        return make_inputs(setup, tree, dims=(16, 24), slots=slots, pool_slots=SLOTS, mode=mode, seed=seed)
    inputs = family_inputs(
        setup, get_family(family), tree, dims=(16, 24), slots=slots, pool_slots=SLOTS, mode=mode, seed=seed
    )  # fmt: skip
    gates = {name: t for name, t in inputs.gates.items() if name not in without}
    return inputs.replace(gates=gates, options={**inputs.options, "recurrence": family})


def _clone(pending: PendingChain) -> PendingChain:
    gates = {name: t.clone() for name, t in pending.gates.items()}
    return PendingChain(pending.k.clone(), pending.v.clone(), gates, pending.length.clone(), pending.start.clone())


def _check_ring(setup: Setup, factors: Factors, before: PendingChain, rows: dict[int, tuple[int, list[int]]]) -> None:
    """Compare a ring with what it was and what was appended; ``rows`` is slot -> (request, path)."""
    after = factors.pending
    assert after is not None
    gates = kept_gates(factors.spec, factors.gates, factors.gate_mode, factors.beta_scale, factors.options)
    pairs = [("k", before.k, after.k, factors.k, 0.0), ("v", before.v, after.v, factors.v, 0.0)]
    pairs += [(n, before.gates[n], after.gates[n], gates[n], 2e-6) for n in before.gates]
    tree = factors.tree
    for name, old, new, source, bound in pairs:
        want = old.clone()
        for slot, (request, path) in rows.items():
            end = int(before.start[slot]) + int(before.length[slot])
            for t, node in enumerate(path):
                at = (int(tree.offsets[request]) + node,) if tree.offsets is not None else (request, node)
                ring = (slot, (end + t) % before.capacity)
                assert_close(f"ring {name}", new[ring], source[at].to(new.dtype), bound)
                want[ring] = new[ring]
        assert_same_bits(f"ring {name} outside of what was appended", new, want)


def check_actions(
    setup: Setup, seed: int, *, mode: str = "ready", variant: Config | None = None, family: str = "gdn",
    without: tuple[str, ...] = (),
) -> set[int]:  # fmt: skip
    """Draw trees, rings and actions, run one commit of two layers, and compare; return the actions that were drawn.

    ``without`` names optional gates of the family that are left out.
    """
    rng = random.Random(seed)
    sizes = [rng.randint(1, 20) for _ in range(4)]
    rows = [random_parents(rng, n, padding=0.1) for n in sizes]
    if rng.random() < 0.5:
        tree = packed_tree(setup, rows, max_nodes=20)
    else:
        tree = dense_tree(setup, [row + [-2] * (20 - len(row)) for row in rows])
    slots = rng.sample(range(SLOTS), 4)
    if seed % 2:
        slots[rng.randrange(4)] = -1
    capacity = rng.choice([21, 32])
    layers, before, lengths = [], [], []
    for n in range(2):
        inputs = _inputs(setup, family, tree, slots, mode, seed + n, without)
        if n == 0:
            lengths = [rng.choice([0, 1, rng.randint(0, capacity - 20)]) for _ in range(SLOTS)]
            starts = [rng.randrange(capacity) for _ in range(SLOTS)]
        if family == "gdn":
            pending = make_pending(setup, inputs, capacity, lengths, starts, seed=seed + n)
        else:
            spec = get_family(family)
            pending = family_pending(setup, spec, mode, inputs, capacity, lengths, starts, seed=seed + n)
        before.append((inputs.state.clone(), _clone(pending)))
        layers.append(CommitLayer(inputs.state, _factors(inputs, pending, mode)))
    actions = rng.sample(list(RowAction), 4)
    live = [[i for i, p in enumerate(row) if p != -2] for row in rows]
    accepted = [rng.choice([-1, *nodes, *nodes, *nodes]) for nodes in live]
    call = CommitCall(
        layers[0].factors.spec, tuple(layers), torch.tensor(slots, dtype=torch.int32, device=setup.device),
        torch.tensor(accepted, dtype=torch.int32, device=setup.device), tree, setup.precision, variant,
        torch.tensor(actions, dtype=torch.int32, device=setup.device),
    )  # fmt: skip
    get_backend(setup.device).commit(call)
    for layer, (state, pending) in zip(layers, before, strict=True):
        old = layer.factors.replace(pending=pending)
        committed = commit_sequential(state, call.slots, old, call.accepted)
        spec, gates = layer.factors.spec, layer.factors.gates
        flushed = flush_sequential(state, call.slots, pending, recurrence=spec, gates=gates)
        want, appended = state.clone(), {}
        for b, (slot, node, action) in enumerate(zip(slots, accepted, actions, strict=True)):
            if slot < 0:
                continue
            new = None
            if action == RowAction.COMMIT and node >= 0:
                new = committed[b]
            elif action == RowAction.FLUSH and lengths[slot] > 0:
                new = flushed[b]
            elif action == RowAction.APPEND and node >= 0:
                appended[slot] = (b, tree.path(b, node))
            if new is not None:
                assert_close(f"state after {action.name}", layer.pool[slot], new, setup.state_bound)
                want[slot] = layer.pool[slot]
        assert_same_bits("states of other rows", layer.pool, want)
        _check_ring(setup, layer.factors, pending, appended)
    return {int(a) for a, slot in zip(actions, slots, strict=True) if slot >= 0}
