"""Trees as inference engines keep them, child and sibling links or a table of parents, to parent indices."""

from __future__ import annotations

import torch

from bole_runtime.backend_choice import backend_name
from bole_runtime.tree.build_torch import PADDING
from bole_runtime.tree.check import check_capacity, check_dense, check_index_tensor

_MAX_NODES = 512


def parents_from_links(
    next_token: torch.Tensor, next_sibling: torch.Tensor, live: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Translate SGLang's ``retrieve_next_token`` and ``retrieve_next_sibling`` to parent indices, on the device.

    Node 0 is the root. ``next_token[b, i]`` is the first child of node i and ``next_sibling[b, i]`` the next child of
    i's parent; -1 ends a list. Nodes that no list reaches from node 0 (SGLang leaves a draft token without a link when
    its parent was not selected), links outside the row and rows that are not live become padding. A node that two
    lists claim belongs to the claimant with the highest index; a first child wins over a sibling. No host sync.

    Args:
        next_token: int32 or int64 [B, N], N up to 512.
        next_sibling: int32 or int64 [B, N].
        live: bool [B], or int32 / int64 slots [B] where -1 marks a stale row.
        out: int32 [B, N], contiguous, written and returned; allocated by default.

    Returns:
        int32 [B, N] in Bole's form: -1 for node 0 of live rows, -2 for padding, else the parent. In SGLang's trees a
        parent comes before its child; where it does not, :meth:`TreeBatch.update_` reports the order.

    Raises:
        TypeError: wrong dtypes.
        ValueError: wrong shapes or devices.
    """
    check_index_tensor("next_token", next_token, 2)
    check_index_tensor("next_sibling", next_sibling, 2)
    batch, nodes = next_token.shape
    check_capacity("next_token: number of nodes", nodes, 1, _MAX_NODES)
    if next_sibling.shape != next_token.shape:
        raise ValueError(f"next_sibling: expected shape {tuple(next_token.shape)}, got {tuple(next_sibling.shape)}")
    if not isinstance(live, torch.Tensor) or live.dtype not in (torch.bool, torch.int32, torch.int64):
        given = live.dtype if isinstance(live, torch.Tensor) else type(live).__name__
        raise TypeError(f"live: expected a bool, int32 or int64 tensor, got {given}")
    check_dense("live", live)
    if live.shape != (batch,):
        raise ValueError(f"live: expected shape ({batch},), got {tuple(live.shape)}")
    if out is not None and not isinstance(out, torch.Tensor):
        raise TypeError(f"out: expected a torch.Tensor, got {type(out).__name__}")
    for name, tensor in (("next_sibling", next_sibling), ("live", live), ("out", out)):
        if tensor is not None and tensor.device != next_token.device:
            raise ValueError(f"{name}: on {tensor.device}, but next_token is on {next_token.device}")
    if out is None:
        out = torch.empty(batch, nodes, dtype=torch.int32, device=next_token.device)
    elif out.dtype is not torch.int32 or tuple(out.shape) != (batch, nodes) or not out.is_contiguous():
        raise ValueError(f"out: expected contiguous int32 [{batch}, {nodes}], got {out.dtype} {tuple(out.shape)}")
    if batch == 0:
        return out
    if backend_name(next_token.device) == "triton":
        from bole_runtime.tree.links_triton import links_into

        links_into(next_token, next_sibling, live, out)
    else:
        keep = live if live.dtype is torch.bool else live >= 0
        out.copy_(torch.where(keep.unsqueeze(1), _follow(next_token.long(), next_sibling.long()), PADDING))
    return out


def parents_from_table(parents: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Do what :meth:`TreeBatch.sglang_parents` says."""
    check_index_tensor("parents", parents, 2)
    if not isinstance(live, torch.Tensor) or live.dtype not in (torch.bool, torch.int32, torch.int64):
        given = live.dtype if isinstance(live, torch.Tensor) else type(live).__name__
        raise TypeError(f"live: expected a bool, int32 or int64 tensor, got {given}")
    check_dense("live", live)
    if live.shape != parents.shape[:1]:
        raise ValueError(f"live: expected shape {tuple(parents.shape[:1])}, got {tuple(live.shape)}")
    keep = live if live.dtype is torch.bool else live >= 0
    out = parents.clone()
    out[:, :1] = -1
    return out.masked_fill_(~keep.unsqueeze(1), PADDING)


def _claimants(links: torch.Tensor) -> torch.Tensor:
    """Return [B, N]: the highest node whose link names this one, or -1."""
    batch, nodes = links.shape
    index = torch.arange(nodes, device=links.device).expand(batch, nodes)
    # Node 0 is nobody's child, and links outside the row claim nothing.
    named = torch.where((links > 0) & (links < nodes), links, nodes)
    found = torch.full((batch, nodes + 1), -1, dtype=torch.int64, device=links.device)
    return found.scatter_reduce_(1, named, index, "amax")[:, :nodes]


def _follow(next_token: torch.Tensor, next_sibling: torch.Tensor) -> torch.Tensor:
    batch, nodes = next_token.shape
    above, before = _claimants(next_token), _claimants(next_sibling)
    index = torch.arange(nodes, device=next_token.device).expand(batch, nodes)
    # The first child of the list a node is in, by pointer doubling; a cycle of siblings never gets to one.
    first = torch.where((above >= 0) | (before < 0), index, before)
    for _ in range(max(1, (nodes - 1).bit_length())):
        first = first.gather(1, first)
    parents = above.gather(1, first)
    parents = torch.where(parents < 0, PADDING, parents)
    parents[:, 0] = -1
    # Below an unreachable node nothing is reachable either; climbing by doubling ends at node 0 or at such a node.
    up = torch.where(parents >= 0, parents, index)
    for _ in range(max(1, (nodes - 1).bit_length())):
        up = up.gather(1, up)
    return torch.where(up == 0, parents, PADDING)
