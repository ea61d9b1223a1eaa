"""The sequential recurrence in fp64, batched over requests and heads: what every output is checked against.

It walks the nodes in order and keeps a state a node, so it shares no algebra with the kernels it checks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bole_codegen.measure import LayerInputs, VerifyInputs

#: Memory that the states of a chunk of requests may take.
CHUNK_BYTES = 2 << 30


def _normalised(x: Tensor, group: int) -> Tensor:
    x = x.double()
    return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(group, dim=2)


def _steps(
    inputs: VerifyInputs, layer: LayerInputs, rows: slice
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v, decay, beta of some requests in fp64, and their committed states."""
    work = inputs.workload
    group = work.hv // work.hk
    q = _normalised(layer.q[rows], group) * work.dk**-0.5
    k = _normalised(layer.k[rows], group)
    # From the raw gates in fp64 where the kernels get those; the fp32 ready gates are their own exact input.
    if work.gate_mode == "raw":
        x = layer.raw["a"][rows].double() + layer.raw["dt_bias"].double()
        decay = torch.exp(-layer.raw["A_log"].double().exp() * torch.logaddexp(x, torch.zeros_like(x)))
        beta = torch.sigmoid(layer.raw["b"][rows].double())
    else:
        decay, beta = layer.ready["g"][rows].double().exp(), layer.ready["beta"][rows].double()
    state = layer.state[inputs.slots[rows].long()].double()
    return q, k, layer.v[rows].double(), decay, beta, state


def _advance(state: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """One token: ``state [B, HV, dv, dk]``, ``k [B, HV, dk]``, ``v [B, HV, dv]``, gates ``[B, HV]``."""
    state = state * decay[..., None, None]
    u = beta[..., None] * (v - (state @ k[..., None])[..., 0])
    return state + u[..., None] * k[..., None, :]


def _chunks(inputs: VerifyInputs, states: int) -> list[slice]:
    work = inputs.workload
    one = max(1, states) * work.hv * work.dk * work.dv * 8
    size = max(1, CHUNK_BYTES // one)
    return [slice(i, min(i + size, work.batch)) for i in range(0, work.batch, size)]


def verify_outputs(inputs: VerifyInputs, index: int) -> Tensor:
    """Return the output of every node of layer ``index``, fp64 ``[B, N, HV, dv]``."""
    layer, work = inputs.layers[index], inputs.workload
    out = torch.empty(layer.v.shape, dtype=torch.float64, device=layer.v.device)
    parents = inputs.parents.long()
    for rows in _chunks(inputs, work.nodes + 2):
        q, k, v, decay, beta, root = _steps(inputs, layer, rows)
        # Place 0 holds the committed state, place i + 1 the state after node i.
        states = root.new_empty((work.nodes + 1, *root.shape))
        states[0] = root
        request = torch.arange(root.shape[0], device=root.device)
        for i in range(work.nodes):
            parent = states[parents[rows, i] + 1, request]
            states[i + 1] = _advance(parent, k[:, i], v[:, i], decay[:, i], beta[:, i])
            out[rows, i] = (states[i + 1] @ q[:, i, :, :, None])[..., 0]
    return out


def accepted_nodes(inputs: VerifyInputs, count: int) -> Tensor:
    """Choose a terminal node for every request whose path has up to ``count`` nodes, as deep as the tree allows.

    Returns:
        int32 ``[B]`` on the inputs' device.
    """
    parents = inputs.parents_host
    chosen = []
    for row in parents:
        depth = [0] * len(row)
        for i, p in enumerate(row):
            depth[i] = depth[p] + 1 if p >= 0 else 1
        best = max((d for d in depth if d <= count), default=1)
        chosen.append(depth.index(best))
    return torch.tensor(chosen, dtype=torch.int32, device=inputs.parents.device)


def accepted_counts(inputs: VerifyInputs, accepted: Tensor) -> list[int]:
    """Return the number of nodes on every accepted path."""
    counts = []
    for row, node in zip(inputs.parents_host, accepted.tolist(), strict=True):
        count = 0
        while node >= 0:
            count, node = count + 1, int(row[node])
        counts.append(count)
    return counts


def committed_states(inputs: VerifyInputs, index: int, accepted: Tensor) -> Tensor:
    """Return the states of layer ``index`` after a commit, fp64 ``[B, HV, dv, dk]``. Call before the commit runs."""
    layer, work = inputs.layers[index], inputs.workload
    counts = accepted_counts(inputs, accepted)
    longest = max(counts, default=0)
    # Left-padded paths: step t of request b is node path[b][t], or -1 before its path begins.
    path = torch.full((work.batch, longest), -1, dtype=torch.long)
    for b, node in enumerate(accepted.tolist()):
        for t in range(longest - 1, longest - 1 - counts[b], -1):
            path[b, t] = node
            node = int(inputs.parents_host[b, node])
    path = path.to(layer.v.device)
    out = torch.empty((work.batch, work.hv, work.dv, work.dk), dtype=torch.float64, device=layer.v.device)
    for rows in _chunks(inputs, 4):
        _, k, v, decay, beta, state = _steps(inputs, layer, rows)
        request = torch.arange(state.shape[0], device=state.device)
        for t in range(longest):
            node = path[rows, t]
            at = (request, node.clamp(min=0))
            new = _advance(state, k[at], v[at], decay[at], beta[at])
            state = torch.where((node >= 0)[:, None, None, None], new, state)
        out[rows] = state
    return out
