"""The convolution with torch operations. Default on the CPU; on a device it runs without a host sync."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bole_runtime.conv.calls import ConvCall, ConvCommitCall, ConvCommitLayer
from bole_runtime.conv.factors import ConvPending
from bole_runtime.tree import TreeBatch

#: Elements of the largest temporary, [requests, nodes, channels]; a batch is processed in slices below it.
_MAX_ELEMENTS = 1 << 24


def _compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype is torch.float64 for t in tensors) else torch.float32


def _parents(tree: TreeBatch, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return parents and depths, int64 [B, N]; what padding nodes have is meaningless, but within the tree."""
    if tree.max_total == 0:
        return torch.zeros_like(index), torch.zeros_like(index)
    parents = tree.parents.flatten()[index].long().clamp(-1, tree.max_nodes - 1)
    return parents, tree.depths.flatten()[index].long()


def _up(parents: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
    """Return the parents of some nodes [B, n]; those of a root stay at some node, which is then not used."""
    return parents.gather(1, node).clamp(min=0)


def _pick(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return ``rows[index]``, zeros when there are no rows."""
    return rows[index] if rows.shape[0] else rows.new_zeros(*index.shape, *rows.shape[1:])


class _Above:
    """The inputs above the roots: the pending ones from the newest to the oldest, then the state's."""

    def __init__(self, state: torch.Tensor, pending: ConvPending | None, slots: torch.Tensor) -> None:
        self.ok = (slots >= 0) & (slots < state.shape[0])
        self.state, self.pending = state, pending
        self.slot = torch.where(self.ok, slots, 0)
        self.length = torch.zeros_like(slots)
        if pending is not None and pending.length.shape[0]:
            self.length = torch.where(self.ok, pending.length[self.slot].long().clamp(0, pending.capacity), 0)

    def token(self, back: int | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return input number ``back`` above the roots (0: the newest), [B, C]; zero for padding rows.

        Where the state is too short, its oldest input stands in.
        """
        old = (self.state.shape[2] - 1 - (back - self.length)).clamp(0, self.state.shape[2] - 1)
        if self.state.shape[0]:
            value = self.state[self.slot, :, old].to(dtype)
        else:
            value = self.state.new_zeros(self.slot.shape[0], self.state.shape[1], dtype=dtype)
        if self.pending is not None and self.state.shape[0]:
            at = (self.pending.start[self.slot].long() + self.length - 1 - back) % self.pending.capacity
            ring = self.pending.x[self.slot, at].to(dtype)
            value = torch.where((self.length > back).unsqueeze(1), ring, value)
        return torch.where(self.ok.unsqueeze(1), value, 0)


def _slices(batch: int, size: int) -> Iterator[slice]:
    step = max(1, _MAX_ELEMENTS // max(1, size))
    return (slice(i, min(i + step, batch)) for i in range(0, batch, step))


@torch.inference_mode()
def tree_conv(call: ConvCall) -> None:
    """Fill ``call.out``, and the capture buffer if there is one."""
    tree, x, width = call.tree, call.x, call.width
    rows = x.flatten(0, -2)
    dtype = _compute_dtype(x, call.weight, call.state)
    index, live = tree.rows()
    slots = call.slots.long()
    live = live & ((slots >= 0) & (slots < call.state.shape[0])).unsqueeze(1)
    parents, depths = _parents(tree, index)
    nodes = torch.arange(tree.max_nodes, device=tree.device).expand(tree.max_batch, -1)
    # Node t steps up, from the node itself on.
    path = [nodes]
    for _ in range(width - 1):
        path.append(_up(parents, path[-1]))
    weight = call.weight.flatten(0, -3) if call.dynamic else call.weight
    result = torch.zeros(tree.max_total + 1, x.shape[-1], dtype=call.out.dtype, device=x.device)
    # Rows that are not live land in one extra row, which is dropped.
    target = torch.where(live, index, tree.max_total)
    for part in _slices(tree.max_batch, tree.max_nodes * x.shape[-1]):
        above = _Above(call.state, call.pending, slots[part])
        depth = depths[part].unsqueeze(2)
        tops = [above.token(e, dtype).unsqueeze(1) for e in range(width - 1)]
        taps = _pick(weight, index[part]).to(dtype) if call.dynamic else weight.to(dtype)
        total = torch.zeros(*index[part].shape, x.shape[-1], dtype=dtype, device=x.device)
        if call.bias is not None:
            total += call.bias.to(dtype)
        for t in range(width - 1, -1, -1):
            value = _pick(rows, index[part].gather(1, path[t][part])).to(dtype)
            for e in range(t):
                value = torch.where(depth == t - 1 - e, tops[e], value)
            total += taps[..., width - 1 - t] * value
        if call.silu:
            total = torch.nn.functional.silu(total)
        result[target[part]] = total.to(result.dtype)
    call.out.copy_(result[:-1].reshape(call.out.shape))
    if call.capture is not None:
        call.capture.x.copy_(x)


@torch.inference_mode()
def conv_commit(call: ConvCommitCall) -> None:
    """Update the pools of every layer."""
    tree = call.tree
    index, live = tree.rows()
    parents, depths = _parents(tree, index)
    request = torch.arange(tree.max_batch, device=tree.device)
    accepted = call.accepted.long()
    inside = (accepted >= 0) & (accepted < tree.max_nodes)
    terminal = torch.where(inside, accepted, 0)
    chosen = inside & live[request, terminal]
    length = torch.where(chosen, depths[request, terminal] + 1, 0)
    longest = max(layer.pool.shape[2] for layer in call.layers)
    path = [terminal.unsqueeze(1)]
    for _ in range(longest - 1):
        path.append(_up(parents, path[-1]))
    rows = index.gather(1, torch.cat(path, 1))
    for layer in call.layers:
        _commit_layer(call, layer, rows, length, chosen)


def _commit_layer(
    call: ConvCommitCall, layer: ConvCommitLayer, rows: torch.Tensor, length: torch.Tensor, chosen: torch.Tensor
) -> None:
    """``rows``: [B, L], the row of the terminal node and those above it."""
    pool, x = layer.pool, layer.factors.x.flatten(0, -2)
    if pool.shape[0] == 0:
        return
    slots = call.slots.long()
    above = _Above(pool, layer.factors.pending, slots)
    ok = chosen & above.ok
    state_length = pool.shape[2]
    new = torch.empty(slots.shape[0], *pool.shape[1:], dtype=pool.dtype, device=pool.device)
    for e in range(state_length):
        value = above.token((e - length).clamp(min=0), pool.dtype)
        new[:, :, state_length - 1 - e] = torch.where(
            (length > e).unsqueeze(1), _pick(x, rows[:, e]).to(pool.dtype), value
        )
    # Rows that do not commit repeat the write of the first one that does, or rewrite slot 0 with itself if none does.
    first = torch.argmax(ok.int()).reshape(1)
    source = torch.where(ok, torch.arange(ok.shape[0], device=ok.device), first)
    some = ok.any()
    pool.index_copy_(0, torch.where(some, slots[source], 0), torch.where(some, new[source], pool[:1]))
