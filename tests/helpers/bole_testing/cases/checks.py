"""Comparisons of a verification and a commit with the float64 recurrence."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bole_runtime.factors import Factors, kept_gates
from bole_runtime.reference import commit_sequential, verify_sequential
from bole_testing.cases.base import Inputs, Setup
from bole_testing.close import assert_close, assert_same_bits, relative_norm

#: "As accurate as the fp32 sequential recurrence": with one key repeated, the rounding of its norm is drawn once and
#: then acts at every node in the same direction, so two correct fp32 computations differ by a small factor.
SEQUENTIAL_SLACK = 4


def check_verify(
    setup: Setup, inputs: Inputs, name: str = "output", *, sequential: bool = False, capture: Factors | None = None
) -> Factors:
    """Verify, compare with the float64 recurrence, and return the factors. Padding rows must be exactly zero.

    Args:
        setup: the setup.
        inputs: the arguments.
        name: for messages.
        sequential: allow what the fp32 sequential recurrence itself gets wrong, where that is more than the bound.
        capture: buffers for the factors, whose contents are checked.
    """
    before = inputs.state.clone()
    out, factors = setup.verify(
        inputs.q, inputs.k, inputs.v, precision=setup.precision, factors=capture,
        out_dtype=torch.promote_types(setup.in_dtype, torch.float32), **inputs.arguments,
    )  # fmt: skip
    if capture is not None:
        check_captured(inputs, factors)
    ref = verify_sequential(inputs.q, inputs.k, inputs.v, **inputs.arguments)
    bound = setup.output_bound
    if sequential:
        single = verify_sequential(inputs.q, inputs.k, inputs.v, **inputs.arguments, dtype=torch.float32)
        bound = max(bound, SEQUENTIAL_SLACK * relative_norm(single, ref))
    dead = ~inputs.live
    if inputs.tree.offsets is not None:
        # Rows that no request owns may hold anything.
        owned = slice(int(inputs.tree.offsets[0]), int(inputs.tree.offsets[-1]))
        out, ref, dead = out[owned], ref[owned], dead[owned]
    else:
        dead = dead | (inputs.slots < 0).unsqueeze(1)
    assert_close(name, out, ref, bound)
    assert bool((out[dead] == 0).all()), f"{name}: a padding row is not zero"
    assert torch.equal(before.view(torch.uint8), inputs.state.view(torch.uint8)), f"{name}: verify changed the state"
    return factors


def check_captured(inputs: Inputs, factors: Factors) -> None:
    """Compare captured factors with the inputs they hold: k and v bit for bit, ready gates to fp32's rounding."""
    rows, live = inputs.tree.rows()
    live = live & (inputs.slots >= 0).unsqueeze(1)
    skip = inputs.k.dim() - 2

    def picked(t: torch.Tensor) -> torch.Tensor:
        return t.flatten(0, skip - 1)[rows[live]]

    assert_same_bits("captured k", picked(factors.k), picked(inputs.k))
    assert_same_bits("captured v", picked(factors.v), picked(inputs.v))
    spec = factors.spec
    tensors = {name: t for name, t in inputs.gates.items() if isinstance(t, torch.Tensor)}
    mode = spec.mode_of(inputs.gates)
    assert mode is not None
    options = {i.name: float(inputs.gates.get(i.name, i.default)) for i in spec.options(mode)}
    wanted = kept_gates(spec, tensors, mode, options.pop("beta_scale", 1.0), options)
    for gate in spec.node_gates(factors.gate_mode):
        assert_close(f"captured {gate.name}", picked(factors.gates[gate.name]), picked(wanted[gate.name]), 1e-6)


def check_commit(
    setup: Setup,
    inputs: Inputs,
    factors: Factors,
    accepted: Sequence[int],
    name: str = "state",
    *,
    sequential: bool = False,
) -> torch.Tensor:
    """Commit to a copy of the pool, compare with the float64 recurrence, and return the pool.

    Rows that nothing is committed to must keep their bits.
    """
    nodes = torch.tensor(list(accepted), dtype=torch.int32, device=setup.device)
    pool = inputs.state.clone()
    setup.commit(pool, inputs.slots, factors, nodes, precision=setup.precision)
    ref = commit_sequential(inputs.state, inputs.slots, factors, nodes)
    written = [b for b, (s, a) in enumerate(zip(inputs.slots.tolist(), accepted, strict=True)) if s >= 0 and a >= 0]
    rows = [int(inputs.slots[b]) for b in written]
    bound = setup.state_bound
    if sequential:
        single = commit_sequential(inputs.state, inputs.slots, factors, nodes, dtype=torch.float32)
        bound = max(bound, SEQUENTIAL_SLACK * relative_norm(single[written], ref[written]))
    if written:
        assert_close(name, pool[rows], ref[written], bound)
    others = [s for s in range(pool.shape[0]) if s not in rows]
    same = torch.equal(pool[others].view(torch.uint8), inputs.state[others].view(torch.uint8))
    assert same or not others, f"{name}: a slot that nothing was committed to has changed"
    return pool
