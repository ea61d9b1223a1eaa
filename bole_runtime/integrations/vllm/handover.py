"""A running request handed from vLLM's N + 1 states to one state and factors, and back.

With one token accepted vLLM reads column 0 of its table and the first W - 1 columns of the window, which is also where
its prefill, its decoding without drafts and its prefix cache expect them. Bole commits to exactly that place, so a
request it serves is one whose ``num_accepted_tokens`` is 1, and going back between two rounds is no work at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bole_runtime.api import commit
from bole_runtime.conv import ConvFactors
from bole_runtime.factors import Factors
from bole_runtime.integrations.vllm.layout import GroupPools
from bole_runtime.integrations.vllm.slots import accepted_slots, check_table, home_slots
from bole_runtime.state.copy_slots import copy_slots
from bole_runtime.validate import check_index


def take_over(pools: GroupPools, table: torch.Tensor, accepted: torch.Tensor) -> None:
    """Move what vLLM left after a step to where Bole, and vLLM with one token accepted, reads it.

    The state of the last accepted token goes to column 0 of the table, the window to the first W - 1 columns. The other
    N blocks of a request are free afterwards. ``num_accepted_tokens`` of these requests is then 1; the caller sets it.
    No host sync on a device.

    Args:
        pools: of the group, changed in place.
        table: int32 or int64 [requests, N + 1] state indices; rows whose first block is 0 or less are padding.
        accepted: int32 or int64 [requests], ``num_accepted_tokens`` of the step.

    Raises:
        TypeError: no int32 or int64 tensors.
        ValueError: wrong shapes.
    """
    home = home_slots(table)
    copy_slots(pools.states, accepted_slots(table, accepted), home)
    if pools.columns is None:
        return
    window = pools.layout.window
    now = pools.columns[:, home.clamp(min=0).long()]
    first = (accepted.long() - 1).clamp(0, now.shape[-1] - window)
    at = first[:, None] + torch.arange(window, device=first.device)
    shifted = now.gather(3, at[None, :, None].expand(*now.shape[:3], window))
    _write(pools.columns[..., :window], home, torch.where(_rows(home >= 0), shifted, now[..., :window]))


def hand_back(
    pools: GroupPools, table: torch.Tensor, factors: Sequence[Factors], inputs: Sequence[Sequence[ConvFactors]],
    lengths: torch.Tensor, *, precision: str = "lossless",
) -> None:  # fmt: skip
    """Make the N + 1 states of vLLM's step from one state and the factors of a verified chain, before any commit.

    For a round that Bole verified and vLLM is to finish: afterwards memory is as if vLLM had run the step itself, and
    its own code takes the tokens that it accepts. The N + 1 states are N + 1 commits, so this is no way to run every
    round. Without a round in flight there is nothing to do; see :func:`take_over`.

    Args:
        pools: of the group, changed in place.
        table: int32 or int64 [requests, N + 1] state indices, N + 1 the nodes of a chain.
        factors: one a layer, of chains.
        inputs: for each layer, those of its convolutions in the order of their channels. Both as
            :class:`~bole_runtime.integrations.engine_rounds.BatchRound` has them.
        lengths: int32 or int64 [requests], tokens of each request in the step.
        precision: that of the verification.

    Raises:
        TypeError: wrong types.
        ValueError: wrong shapes, or another number of layers than the pools have.
    """
    home, nodes = home_slots(table), check_table(table).shape[1]
    lengths = check_index("lengths", lengths, table.device, table.shape[0])
    layers = pools.states.shape[0]
    for name, given in (("factors", factors), ("inputs", inputs)):
        if len(given) != layers and (name == "factors" or pools.columns is not None):
            raise ValueError(f"{name}: expected {layers}, one a layer, got {len(given)}")
    if any(f.tree.is_packed or f.tree.lead != (table.shape[0], nodes) for f in factors):
        raise ValueError(f"factors: expected dense trees of {tuple(table.shape)} nodes, one for each of the table")
    none = torch.full_like(home, -1)
    # Column 0 last: all others start from the state in it.
    for n in reversed(range(nodes)):
        live = (home >= 0) & (lengths > n) & (table[:, n] > 0)
        target = torch.where(live, table[:, n].to(home.dtype), none)
        if n:
            copy_slots(pools.states, home, target)
        commit(list(pools.states), target, factors, torch.where(live, n, none), precision=precision)
    if pools.columns is None:
        return
    window = pools.layout.window
    now = pools.columns[:, home.clamp(min=0).long()]
    x = torch.stack([torch.cat([f.x for f in parts], -1) for parts in inputs]).transpose(2, 3).to(now.dtype)
    # The oldest input of the window is of no use to any token after the first of the step.
    moved = torch.cat([now[..., 1:window], x], dim=3)
    ends = window - 1 + lengths
    at = torch.arange(moved.shape[-1], device=home.device)
    live = (home >= 0)[:, None] & (at < ends[:, None])
    _write(
        pools.columns[..., : moved.shape[-1]], home,
        torch.where(live[None, :, None], moved, now[..., : moved.shape[-1]]),
    )  # fmt: skip


def _rows(mask: torch.Tensor) -> torch.Tensor:
    return mask[None, :, None, None]


def _write(columns: torch.Tensor, home: torch.Tensor, values: torch.Tensor) -> None:
    # Padding rows write what the null block held: which rows those are is not known on the host.
    columns[:, home.clamp(min=0).long()] = values
