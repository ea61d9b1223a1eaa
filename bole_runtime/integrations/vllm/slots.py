"""vLLM's indices of a speculative step as Bole's slots, trees and accepted nodes. Device tensors, no host sync.

The table of state indices [requests, N + 1] names the block that holds the state after each token of the last step;
block 0 is the null block. ``num_accepted_tokens`` counts the token that was emitted before the drafts, so it is 1 to
N + 1: token i is node i of a chain, and the last accepted one is node ``num_accepted_tokens - 1``.
"""

from __future__ import annotations

import torch

from bole_runtime.validate import check_index, not_a


def _live(blocks: torch.Tensor) -> torch.Tensor:
    return torch.where(blocks > 0, blocks, torch.full_like(blocks, -1))


def check_table(table: torch.Tensor) -> torch.Tensor:
    """Return a table of state indices.

    Raises:
        TypeError: no int32 or int64 tensor.
        ValueError: not [requests, N + 1].
    """
    if not isinstance(table, torch.Tensor):
        not_a("table", table, "a torch.Tensor")
    if table.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"table: dtype {table.dtype} is not allowed; allowed: torch.int32, torch.int64")
    if table.dim() != 2 or table.shape[1] < 1:
        raise ValueError(f"table: expected [requests, N + 1], got shape {tuple(table.shape)}")
    return table


def home_slots(table: torch.Tensor) -> torch.Tensor:
    """Return the slot that Bole keeps a request in: column 0, where vLLM's prefill leaves its state too.

    Args:
        table: int32 or int64 [requests, N + 1], or one column.

    Returns:
        [requests]; -1 for padding rows.

    Raises:
        TypeError: no int32 or int64 tensor.
        ValueError: not [requests, N + 1].
    """
    return _live(check_table(table)[:, 0])


def accepted_slots(table: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """Return the slot of the last accepted token's state, while vLLM's own path runs.

    Args:
        table: int32 or int64 [requests, N + 1].
        accepted: int32 or int64 [requests], vLLM's ``num_accepted_tokens``.

    Returns:
        [requests]; -1 for padding rows.

    Raises:
        TypeError: no int32 or int64 tensors.
        ValueError: wrong shapes.
    """
    table = check_table(table)
    accepted = check_index("accepted", accepted, table.device, table.shape[0])
    # A stale count of a padding row must not lead out of the table.
    column = (accepted.long() - 1).clamp(0, table.shape[1] - 1)
    return _live(table.gather(1, column[:, None])[:, 0])


def accepted_nodes(table: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """Return the terminal node that Bole commits for a chain.

    Args:
        table: int32 or int64 [requests, N + 1].
        accepted: int32 or int64 [requests], vLLM's ``num_accepted_tokens`` of this step.

    Returns:
        [requests], of the type of ``accepted``; -1, nothing to commit, for padding rows.

    Raises:
        TypeError: no int32 or int64 tensors.
        ValueError: wrong shapes.
    """
    table = check_table(table)
    accepted = check_index("accepted", accepted, table.device, table.shape[0])
    return torch.where(table[:, 0] > 0, accepted - 1, torch.full_like(accepted, -1))


def chain_parents(starts: torch.Tensor, nodes: int) -> torch.Tensor:
    """Return the chains of a step in which requests have tokens of different number.

    Args:
        starts: int32 or int64 [requests + 1], vLLM's ``query_start_loc``: first token of each request.
        nodes: N + 1.

    Returns:
        int32 [requests, nodes] for :meth:`bole_runtime.TreeBatch.update_`, -2 behind a request's last token.
    """
    at = torch.arange(nodes, dtype=torch.int32, device=starts.device)
    live = at < (starts[1:] - starts[:-1])[:, None]
    return torch.where(live, at - 1, torch.full_like(at, -2))


def to_nodes(tokens: torch.Tensor, starts: torch.Tensor, nodes: int) -> torch.Tensor:
    """Return rows of tokens, as vLLM's layers get them, as dense rows of nodes.

    Args:
        tokens: [tokens, ...].
        starts: int32 or int64 [requests + 1].
        nodes: N + 1.

    Returns:
        [requests, nodes, ...]; nodes that a request has no token for hold another token's values.
    """
    at = starts[:-1, None].long() + torch.arange(nodes, device=starts.device)
    return tokens[at.clamp(max=max(tokens.shape[0] - 1, 0))]


def to_tokens(rows: torch.Tensor, starts: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return dense rows of nodes as rows of tokens, the reverse of :func:`to_nodes`.

    Args:
        rows: [requests, nodes, ...].
        starts: int32 or int64 [requests + 1].
        tokens: how many, known on the host; those behind the last request hold other tokens' values.

    Returns:
        [tokens, ...].
    """
    at = torch.arange(tokens, device=starts.device)
    row = torch.searchsorted(starts[1:].long(), at, right=True).clamp(max=max(rows.shape[0] - 1, 0))
    node = (at - starts[row].long()).clamp(max=rows.shape[1] - 1)
    return rows[row, node]
