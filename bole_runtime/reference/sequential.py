"""Walks trees node by node with the step function of a family."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.factors import Factors, PendingChain, pending_gates
from bole_runtime.families import RecurrenceSpec, get_family, get_reference
from bole_runtime.tree import TreeBatch


def _normalised(x: torch.Tensor, eps: float, l2norm: bool) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt() if l2norm else x


def _options(spec: RecurrenceSpec, mode: str, gates: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
    return {i.name: float(gates.get(i.name, i.default)) for i in spec.options(mode)}  # type: ignore[arg-type]


class _Tokens:
    """Rows of a segment, flattened to [rows, HV, ...], and the step over one of them.

    Vectors that the family normalises are normalised, and those of a key head repeated for its value heads.
    """

    def __init__(
        self,
        spec: RecurrenceSpec,
        q: torch.Tensor | None,
        k: torch.Tensor,
        v: torch.Tensor,
        gates: Mapping[str, torch.Tensor],
        mode: str,
        options: Mapping[str, float],
        l2norm: bool,
        dtype: torch.dtype,
    ) -> None:
        self._family = get_reference(spec)
        heads = v.shape[-2]

        def rows(name: str, x: torch.Tensor) -> torch.Tensor:
            shape = spec.by_name[name].shape
            if len(shape) == 2:
                return x.reshape(-1, heads)
            x = _normalised(x.to(dtype), spec.l2norm_eps, l2norm and name in spec.normed)
            return x.repeat_interleave(heads // x.shape[-2], dim=-2).flatten(0, -3)

        ready = self._family.ready_gates(gates, mode, options, dtype)
        per_node = {name for name in ready if spec.by_name[name].shape[0] == "node"}
        self.q = None if q is None else rows("q", q)
        self.k, self.v = rows("k", k), rows("v", v)
        self.gates = {name: rows(name, ready[name]) for name in per_node}
        self.parameters = {name: t for name, t in ready.items() if name not in per_node}

    def step(self, state: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        gates = {name: t[row] for name, t in self.gates.items()}
        q = None if self.q is None else self.q[row]
        state, out = self._family.step(state, q, self.k[row], self.v[row], {**gates, **self.parameters})
        return state, state if out is None else out


def _topology(tree: TreeBatch) -> list[list[tuple[int, int]]]:
    """Return (row, parent) of every node of every request; parent -2 for padding and for invalid nodes."""
    parents = tree.parents.flatten().tolist()
    offsets = tree.offsets.tolist() if tree.offsets is not None else None
    requests = []
    for b in range(tree.max_batch):
        first = b * tree.max_nodes if offsets is None else offsets[b]
        count = tree.max_nodes if offsets is None else min(offsets[b + 1] - first, tree.max_nodes)
        nodes: list[tuple[int, int]] = []
        depth: list[int] = []
        for i in range(count):
            p = parents[first + i]
            valid = p == -1 or (0 <= p < i and depth[p] >= 0)
            d = (depth[p] + 1 if p >= 0 else 0) if valid else -1
            depth.append(d if d <= tree.max_depth else -1)
            nodes.append((first + i, p if depth[i] >= 0 else -2))
        requests.append(nodes)
    return requests


def _with_pending(state: torch.Tensor, slot: int, chain: PendingChain | None, tokens: _Tokens | None) -> torch.Tensor:
    if chain is None or tokens is None:
        return state
    start = int(chain.start[slot])
    for t in range(int(chain.length[slot])):
        state, _ = tokens.step(state, slot * chain.capacity + (start + t) % chain.capacity)
    return state


def verify_sequential(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    gates: Mapping[str, torch.Tensor | float],
    state: torch.Tensor,
    slots: torch.Tensor,
    tree: TreeBatch,
    recurrence: str | RecurrenceSpec = "gdn",
    scale: float | None = None,
    qk_l2norm: bool | None = None,
    pending: PendingChain | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the output of every node, [B, N, HV, dv] or packed [T, HV, dv], in ``dtype``; zero for padding.

    The arguments are those of :func:`bole_runtime.verify`, and are not checked. Every operation runs in ``dtype``.
    """
    spec = get_family(recurrence) if isinstance(recurrence, str) else recurrence
    mode = next(m for m in spec.modes if spec.required[m] <= gates.keys())
    options = _options(spec, mode, gates)
    tensors = {name: t for name, t in gates.items() if isinstance(t, torch.Tensor)}
    l2norm = spec.qk_l2norm if qk_l2norm is None else qk_l2norm
    tokens = _Tokens(spec, q, k, v, tensors, mode, options, l2norm, dtype)
    assert tokens.q is not None
    tokens.q = tokens.q * (spec.default_scale(q.shape[-1]) if scale is None else scale)
    chain = None if pending is None else _pending_tokens(spec, pending, tensors, mode, options, l2norm, dtype)
    out = torch.zeros_like(tokens.v)
    for slot, nodes in zip(slots.tolist(), _topology(tree), strict=True):
        if not 0 <= slot < state.shape[0]:
            continue
        root = _with_pending(state[slot].to(dtype), slot, pending, chain)
        states: list[torch.Tensor] = []
        for row, parent in nodes:
            if parent == -2:
                states.append(root)  # never read: no live node has a padding parent
                continue
            new, out[row] = tokens.step(root if parent == -1 else states[parent], row)
            states.append(new)
    return out.reshape(v.shape)


def _pending_tokens(
    spec: RecurrenceSpec,
    pending: PendingChain,
    gates: Mapping[str, torch.Tensor],
    mode: str,
    options: Mapping[str, float],
    l2norm: bool,
    dtype: torch.dtype,
) -> _Tokens:
    kept, tensors = pending_gates(spec, pending, gates, mode)
    return _Tokens(spec, None, pending.k, pending.v, tensors, kept, options, l2norm, dtype)


def commit_sequential(
    pool: torch.Tensor,
    slots: torch.Tensor,
    factors: Factors,
    accepted: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the state of every request after a commit, [B, HV, dv, dk] in ``dtype``. ``pool`` is not modified.

    A row whose ``accepted`` is -1 (or no live node) keeps its state; a row whose slot is -1 is zero.
    """
    spec, tree = factors.spec, factors.tree
    gates, mode, options, l2norm = factors.gates, factors.gate_mode, factors.all_options, factors.qk_l2norm
    tokens = _Tokens(spec, None, factors.k, factors.v, gates, mode, options, l2norm, dtype)
    chain = None
    if factors.pending is not None:
        chain = _pending_tokens(spec, factors.pending, gates, mode, options, l2norm, dtype)
    out = torch.zeros(slots.shape[0], *pool.shape[1:], dtype=dtype, device=pool.device)
    for b, (slot, node, nodes) in enumerate(zip(slots.tolist(), accepted.tolist(), _topology(tree), strict=True)):
        if not 0 <= slot < pool.shape[0]:
            continue
        state = pool[slot].to(dtype)
        if 0 <= node < len(nodes) and nodes[node][1] != -2:
            state = _with_pending(state, slot, factors.pending, chain)
            path = [node]
            while nodes[path[-1]][1] >= 0:
                path.append(nodes[path[-1]][1])
            for i in reversed(path):
                state, _ = tokens.step(state, nodes[i][0])
        out[b] = state
    return out


def flush_sequential(
    pool: torch.Tensor,
    slots: torch.Tensor,
    pending: PendingChain,
    *,
    recurrence: str | RecurrenceSpec = "gdn",
    qk_l2norm: bool | None = None,
    gates: Mapping[str, torch.Tensor | float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the state of every request after its pending chain, [B, HV, dv, dk] in ``dtype``.

    ``pool`` is not modified; a row whose slot is -1 is zero. ``gates`` are those of the call that the chain belongs to;
    only their parameters and floats are read, so families without any need none.
    """
    spec = get_family(recurrence) if isinstance(recurrence, str) else recurrence
    l2norm = spec.qk_l2norm if qk_l2norm is None else qk_l2norm
    given = dict(gates or {})
    mode = next(m for m in spec.modes if pending.gates.keys() == {i.name for i in spec.node_gates(m)})
    options = _options(spec, mode, given)
    tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
    chain = _pending_tokens(spec, pending, tensors, mode, options, l2norm, dtype)
    out = torch.zeros(slots.shape[0], *pool.shape[1:], dtype=dtype, device=pool.device)
    for b, slot in enumerate(slots.tolist()):
        if 0 <= slot < pool.shape[0]:
            out[b] = _with_pending(pool[slot].to(dtype), slot, pending, chain)
    return out
