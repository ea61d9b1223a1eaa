"""The sequential recurrence in fp64, batched over requests and heads: what every output is checked against.

It walks the nodes in order and keeps a state a node, so it shares no algebra with the kernels it checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bole_codegen.measure import LayerInputs, VerifyInputs
from bole_runtime.families import get_family, get_reference

#: Memory that the states of a chunk of requests may take.
CHUNK_BYTES = 2 << 30


@dataclass
class _Steps:
    """Tokens of some requests in fp64, as the family's recurrence reads them, and the committed states.

    Attributes:
        q: ``[B, N, HV, dk]``, scaled; k as q, v ``[B, N, HV, dv]``.
        gates: ready gates ``[B, N, HV, ...]``.
        state: ``[B, HV, dv, dk]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: dict[str, Tensor]
    state: Tensor
    _step: Callable[..., tuple[Tensor, Tensor]]

    def advance(self, state: Tensor, at: tuple[slice | Tensor, int | Tensor]) -> tuple[Tensor, Tensor]:
        """Return the states and outputs after the tokens ``at``, one of every request."""
        gates = {name: gate[at] for name, gate in self.gates.items()}
        return self._step(state, self.q[at], self.k[at], self.v[at], gates)


def _steps(inputs: VerifyInputs, layer: LayerInputs, rows: slice) -> _Steps:
    """Read some requests; the family's own step is one token of one request, which vmap widens to all of them."""
    work = inputs.workload
    spec = get_family(work.family)
    family, mode = get_reference(spec), work.gate_mode
    options = {i.name: i.default or 0.0 for i in spec.options(mode)}
    given = {name: g[rows] if spec.by_name[name].shape[0] == "node" else g for name, g in layer.gates(mode).items()}
    # From the raw gates in fp64 where the kernels get those; the fp32 ready gates are their own exact input.
    ready = family.ready_gates(given, mode, options, torch.float64)

    def vectors(name: str, x: Tensor) -> Tensor:
        x = x.double()
        if spec.qk_l2norm and name in spec.normed:
            x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + spec.l2norm_eps)
        return x.repeat_interleave(work.hv // x.shape[2], dim=2)

    gates, fixed = {}, {}
    for name, gate in ready.items():
        shape = spec.by_name[name].shape
        if shape[0] != "node":
            fixed[name] = gate
        else:
            gates[name] = gate if len(shape) == 2 else vectors(name, gate)

    def one(state: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        return family.step(state, q, k, v, {**gates, **fixed})

    return _Steps(
        q=vectors("q", layer.q[rows]) * spec.default_scale(work.dk),
        k=vectors("k", layer.k[rows]),
        v=layer.v[rows].double(),
        gates=gates,
        state=layer.state[inputs.slots[rows].long()].double(),
        _step=torch.vmap(one),
    )


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
        steps = _steps(inputs, layer, rows)
        root = steps.state
        # Place 0 holds the committed state, place i + 1 the state after node i.
        states = root.new_empty((work.nodes + 1, *root.shape))
        states[0] = root
        request = torch.arange(root.shape[0], device=root.device)
        for i in range(work.nodes):
            parent = states[parents[rows, i] + 1, request]
            states[i + 1], out[rows, i] = steps.advance(parent, (slice(None), i))
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
        steps = _steps(inputs, layer, rows)
        state = steps.state
        request = torch.arange(state.shape[0], device=state.device)
        for t in range(longest):
            node = path[rows, t]
            new, _ = steps.advance(state, (request, node.clamp(min=0)))
            state = torch.where((node >= 0)[:, None, None, None], new, state)
        out[rows] = state
    return out
