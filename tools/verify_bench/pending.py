"""Points with a pending chain: accepted tokens above the roots that are not in the state yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

import torch
from peers import ChainedInputs

from bole_codegen.measure import VerifyInputs, Workload, make_layer_inputs, ready_gates
from bole_runtime.factors import PendingChain
from bole_runtime.kernels.problem import PENDING_BUCKETS, SMALL
from verify_bench import oracle

#: Families whose pending tokens can be drawn here.
FAMILIES = ("gdn",)


def add_pending(inputs: VerifyInputs, work: Workload, seed: int) -> VerifyInputs:
    """Draw pending tokens of every request, with the parameters of its layer; the inputs themselves if there are none.

    Args:
        inputs: of the point.
        work: of the point; says how many tokens are pending.
        seed: other tokens than those of the nodes.
    """
    if not work.pending:
        return inputs
    device = inputs.parents.device
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    drawn = []
    for layer in inputs.layers:
        tokens = make_layer_inputs(replace(work, nodes=work.pending, pending=0), 0, generator, device)
        raw = {**tokens.raw, **{name: layer.raw[name] for name in ("A_log", "dt_bias")}}
        drawn.append(replace(tokens, raw=raw, ready=ready_gates(raw)))
    same = {f.name: getattr(inputs, f.name) for f in fields(VerifyInputs)}
    return ChainedInputs(**{**same, "workload": replace(inputs.workload, pending=work.pending)}, pending=tuple(drawn))


def roots(inputs: VerifyInputs, indices: Iterable[int]) -> VerifyInputs:
    """Return inputs whose layers ``indices`` have the pending tokens in their states, in fp64: what oracles start from.

    States are read as they are now. Without pending tokens these are the inputs themselves.
    """
    if not isinstance(inputs, ChainedInputs):
        return inputs
    work, count, device = inputs.workload, inputs.workload.pending, inputs.parents.device
    parents = torch.arange(-1, count - 1, dtype=torch.int32, device=device).expand(work.batch, count).contiguous()
    last = torch.full((work.batch,), count - 1, dtype=torch.int32, device=device)
    layers = list(inputs.layers)
    for index in indices:
        tokens = replace(inputs.pending[index], state=layers[index].state)
        chain = VerifyInputs((tokens,), parents, inputs.slots, count - 1, replace(work, nodes=count, pending=0))
        state = torch.zeros_like(layers[index].state, dtype=torch.float64)
        state[inputs.slots.long()] = oracle.committed_states(chain, 0, last)
        layers[index] = replace(layers[index], state=state)
    return replace(inputs, layers=tuple(layers))


def chains(inputs: VerifyInputs) -> list[PendingChain] | None:
    """Return the pending tokens as Bole's rings, one a layer, or None without any. Rows that hold no token are NaN."""
    if not isinstance(inputs, ChainedInputs):
        return None
    count, device = inputs.workload.pending, inputs.parents.device
    slots, rows = inputs.layers[0].state.shape[0], inputs.slots.long()
    capacity = next(size for size in (SMALL, *PENDING_BUCKETS) if size >= count)
    length = torch.zeros(slots, dtype=torch.int32, device=device)
    length[rows] = count
    # Rings that begin anywhere.
    start = (5 * torch.arange(slots, dtype=torch.int32, device=device) + capacity - 3) % capacity
    place = (start[rows, None] + torch.arange(count, device=device)) % capacity
    made = []
    for tokens in inputs.pending:
        rings = []
        for x in (tokens.k, tokens.v, tokens.ready["g"], tokens.ready["beta"]):
            ring = torch.full((slots, capacity, *x.shape[2:]), torch.nan, dtype=x.dtype, device=device)
            ring[rows[:, None], place] = x
            rings.append(ring)
        made.append(PendingChain(rings[0], rings[1], {"g": rings[2], "beta": rings[3]}, length, start))
    return made
