"""Budget rules: how many nodes a verification step may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from bole_runtime.budget.allocation import reach
from bole_runtime.tree.check import INDEX_DTYPES

if TYPE_CHECKING:
    from bole_runtime.budget.table import CalibrationTable


def published_nodes(table: CalibrationTable, batch: int, kv: int, eps: float = 0.1, depth: int | None = None) -> int:
    """Return the largest calibrated number of nodes a request whose forward costs little more than decoding.

    The rule of the Bole paper (arXiv 2608.01651): the largest N with ``T_ver(N) <= (1 + eps) * T_dec``.

    Args:
        table: calibration.
        batch: requests; the next calibrated batch upward counts.
        kv: context length; likewise.
        eps: share of extra time that is allowed, 0 or more.
        depth: tree depth; likewise; default the largest calibrated one.

    Returns:
        Nodes a request, 1 at least (plain decoding).

    Raises:
        ValueError: ``eps`` is negative, or the table has nothing for such a batch.
    """
    if not eps >= 0:
        raise ValueError(f"eps: {eps} is not allowed; allowed: 0 or more")
    limit = (1 + eps) * table.cost(batch, 1, kv, depth)
    return max(n for n in table.nodes(batch, kv, depth) if n == 1 or table.cost(batch, n, kv, depth) <= limit)


def goodput_nodes(
    table: CalibrationTable,
    tokens: Callable[[int], float],
    batch: int,
    kv: int,
    depth: int | None = None,
    overhead_us: float = 0.0,
) -> tuple[int, float]:
    """Return the calibrated number of nodes a request with the most expected tokens per second. Host code.

    Args:
        table: calibration.
        tokens: expected tokens of the whole batch in a step of N nodes a request, the bonus tokens included.
        batch: requests.
        kv: context length.
        depth: tree depth; default the largest calibrated one.
        overhead_us: time of a round outside the forward (drafting, sampling, commit), when N > 1.

    Returns:
        Nodes a request, and expected tokens per second.

    Raises:
        ValueError: ``overhead_us`` is negative, or the table has nothing for such a batch.
    """
    if not overhead_us >= 0:
        raise ValueError(f"overhead_us: {overhead_us} is not allowed; allowed: 0 or more")
    best, rate = 1, 0.0
    for nodes in table.nodes(batch, kv, depth):
        cost = table.cost(batch, nodes, kv, depth) + (overhead_us if nodes > 1 else 0.0)
        got = tokens(nodes) / (cost * 1e-6)
        if got > rate:
            best, rate = nodes, got
    return best, rate


def expected_tokens(
    parents: torch.Tensor,
    scores: torch.Tensor,
    totals: torch.Tensor,
    max_nodes: int | None = None,
    max_depth: int | None = None,
) -> torch.Tensor:
    """Return how many tokens a step is expected to give for several budgets, on the device.

    A step emits one token for every accepted node (the root stands for the bonus token), so the expectation is the sum
    of the acceptance probabilities of the nodes that :func:`allocate` would choose.

    Args:
        parents: int [B, C].
        scores: fp32 [B, C].
        totals: int [K], nodes in all of each budget, on the same device.
        max_nodes: as in :func:`reach`.
        max_depth: as in :func:`reach`.

    Returns:
        fp32 [K].

    Raises:
        TypeError: wrong dtypes.
        ValueError: wrong shapes or devices.
    """
    _check_on_device("totals", totals, parents)
    return _gains(reach(parents, scores, max_nodes, max_depth).flatten(), totals)


def _gains(key: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    if key.shape[0] == 0:
        return torch.zeros(totals.shape, device=totals.device)
    gains = key.sort(descending=True).values.clamp(0.0, 1.0).cumsum(0)
    last = totals.long().clamp(max=key.shape[0]) - 1
    return torch.where(last >= 0, gains[last.clamp(min=0)], 0.0)


def choose_capacity(
    parents: torch.Tensor,
    scores: torch.Tensor,
    totals: torch.Tensor,
    costs_us: torch.Tensor,
    max_nodes: int | None = None,
    max_depth: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the capacity bucket with the most expected tokens per second. Fixed shapes, no host sync.

    A bucket without a row for every live request counts only where no bucket has one: requests at the end of the batch
    would get no token, round after round. A cost that is not above 0, or no number, rules its bucket out.

    Which graph to replay is the host's choice, so it needs the index; copy it to pinned memory without blocking and use
    the one of the round before, or take :func:`goodput_nodes`.

    Args:
        parents: int [B, C], candidates.
        scores: fp32 [B, C], acceptance probabilities, after correction (:class:`AcceptanceModel`).
        totals: int [K], rows of each bucket.
        costs_us: fp32 [K], time of a whole round in each bucket.
        max_nodes: as in :func:`reach`.
        max_depth: as in :func:`reach`.

    Returns:
        Index int64 [] (the first among ties; 0 if every bucket is ruled out), and expected tokens per second fp32 [K],
        0 for a bucket that is ruled out.

    Raises:
        TypeError: wrong dtypes.
        ValueError: shapes or devices differ.
    """
    for name, given in (("totals", totals), ("costs_us", costs_us)):
        if not isinstance(given, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(given).__name__}")
    if totals.dim() != 1 or totals.shape != costs_us.shape or totals.shape[0] == 0:
        raise ValueError(f"totals, costs_us: expected [K] both, got {tuple(totals.shape)} and {tuple(costs_us.shape)}")
    key = reach(parents, scores, max_nodes, max_depth).flatten()
    _check_on_device("totals", totals, parents)
    if costs_us.device != parents.device:
        raise ValueError(f"costs_us: on {costs_us.device}, but parents are on {parents.device}")
    costs = costs_us.float()
    # Roots have key 2, all other nodes at most 1.
    live = (key > 1).sum()
    enough = (totals >= live) | (totals.amax() < live)
    rates = torch.where(enough & (costs > 0), _gains(key, totals) / (costs * 1e-6), 0.0)
    index = torch.arange(rates.shape[0], device=rates.device)
    return torch.where(rates >= rates.amax(), index, rates.shape[0]).amin(), rates


def _check_on_device(name: str, given: object, parents: torch.Tensor) -> None:
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(given).__name__}")
    if given.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name}: dtype {given.dtype} is not allowed; allowed: torch.int32, torch.int64")
    if given.device != parents.device:
        raise ValueError(f"{name}: on {given.device}, but parents are on {parents.device}")
