"""Walks trees node by node with the step function of a family."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.factors import Factors, PendingChain
from bole_runtime.families import RecurrenceSpec, get_family, get_reference
from bole_runtime.tree import TreeBatch


def _normalised(x: torch.Tensor, eps: float, heads: int, l2norm: bool, dtype: torch.dtype) -> torch.Tensor:
    """Return [..., heads, dk] in ``dtype``: l2-normalised if asked, each key head repeated for its value heads."""
    x = x.to(dtype)
    if l2norm:
        x = x / (x.square().sum(-1, keepdim=True) + eps).sqrt()
    return x.repeat_interleave(heads // x.shape[-2], dim=-2)


class _Tokens:
    """Normalised rows of a segment, flattened to [rows, HV, d], and the step over one of them."""

    def __init__(
        self,
        spec: RecurrenceSpec,
        q: torch.Tensor | None,
        k: torch.Tensor,
        v: torch.Tensor,
        gates: Mapping[str, torch.Tensor],
        mode: str,
        beta_scale: float,
        l2norm: bool,
        dtype: torch.dtype,
    ) -> None:
        self._family = get_reference(spec)
        heads = v.shape[-2]
        self.q = None if q is None else _normalised(q, spec.l2norm_eps, heads, l2norm, dtype).flatten(0, -3)
        self.k = _normalised(k, spec.l2norm_eps, heads, l2norm, dtype).flatten(0, -3)
        self.v = v.to(dtype).flatten(0, -3)
        ready = self._family.ready_gates(gates, mode, beta_scale, dtype)
        self.gates = {name: t.reshape(self.v.shape[0], heads, *t.shape[k.dim() - 1 :]) for name, t in ready.items()}

    def step(self, state: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        gates = {name: t[row] for name, t in self.gates.items()}
        q = None if self.q is None else self.q[row]
        state, out = self._family.step(state, q, self.k[row], self.v[row], gates)
        return state, out


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
    mode = next(m for m in spec.modes if spec.node_gates(m)[0].name in gates)
    beta_scale = float(gates.get("beta_scale", 1.0))
    tensors = {name: t for name, t in gates.items() if isinstance(t, torch.Tensor)}
    l2norm = spec.qk_l2norm if qk_l2norm is None else qk_l2norm
    tokens = _Tokens(spec, q, k, v, tensors, mode, beta_scale, l2norm, dtype)
    assert tokens.q is not None
    tokens.q = tokens.q * (spec.default_scale(q.shape[-1]) if scale is None else scale)
    chain = None if pending is None else _pending_tokens(spec, pending, l2norm, dtype)
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


def _pending_tokens(spec: RecurrenceSpec, pending: PendingChain, l2norm: bool, dtype: torch.dtype) -> _Tokens:
    return _Tokens(spec, None, pending.k, pending.v, pending.gates, "ready", 1.0, l2norm, dtype)


def flush_sequential(
    pool: torch.Tensor,
    slots: torch.Tensor,
    pending: PendingChain,
    *,
    recurrence: str | RecurrenceSpec = "gdn",
    qk_l2norm: bool | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the state of every request after its pending chain, [B, HV, dv, dk] in ``dtype``.

    ``pool`` is not modified; a row whose slot is -1 is zero.
    """
    spec = get_family(recurrence) if isinstance(recurrence, str) else recurrence
    chain = _pending_tokens(spec, pending, spec.qk_l2norm if qk_l2norm is None else qk_l2norm, dtype)
    out = torch.zeros(slots.shape[0], *pool.shape[1:], dtype=dtype, device=pool.device)
    for b, slot in enumerate(slots.tolist()):
        if 0 <= slot < pool.shape[0]:
            out[b] = _with_pending(pool[slot].to(dtype), slot, pending, chain)
    return out


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
    tokens = _Tokens(
        spec, None, factors.k, factors.v, factors.gates, factors.gate_mode, factors.beta_scale, factors.qk_l2norm, dtype
    )
    chain = None
    if factors.pending is not None:
        chain = _pending_tokens(spec, factors.pending, factors.qk_l2norm, dtype)
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
