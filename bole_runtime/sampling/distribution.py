"""The target distribution of a row of logits, and drawing from it, in torch."""

from __future__ import annotations

import torch

from bole_runtime.sampling.params import GREEDY_TEMPERATURE, SamplingParams
from bole_runtime.tree.check import check_dense

_NEVER = float("-inf")


def unusable(logits: torch.Tensor) -> torch.Tensor:
    """Return bool [...]: the row of logits [..., V] has a NaN, a +inf or no finite value."""
    return (logits.isnan() | (logits == float("inf"))).any(-1) | ~logits.isfinite().any(-1)


def greedy_token(logits: torch.Tensor) -> torch.Tensor:
    """Return the id of the largest logit [...], int64: the lowest id among ties; NaN counts as -inf."""
    size = logits.shape[-1]
    clean = torch.where(logits.isnan(), _NEVER, logits)
    index = torch.arange(size, device=logits.device)
    return torch.where(clean == clean.amax(-1, keepdim=True), index, size).amin(-1)


def draw(weights: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative sum: the lowest id whose cumulative weight exceeds ``number`` times the total.

    Args:
        weights: fp32 [..., V], not negative, not necessarily normalised.
        number: fp32 [...] in [0, 1).

    Returns:
        int64 [...]; a token without weight is never drawn (0 if all are without).
    """
    size = weights.shape[-1]
    sums = weights.cumsum(-1)
    index = torch.arange(size, device=weights.device)
    above = (sums > (number * sums[..., -1]).unsqueeze(-1)) & (weights > 0)
    found = torch.where(above, index, size).amin(-1)
    # Rounding can leave nothing above for numbers next to 1.
    last = torch.where(weights > 0, index, 0).amax(-1)
    return torch.where(found < size, found, last)


def target_probs(logits: torch.Tensor, params: SamplingParams | None = None) -> torch.Tensor:
    """Return the distribution that sampling under ``params`` draws from.

    Args:
        logits: floating [B, ..., V], one leading row a request.
        params: temperature and filters of the B requests; default temperature 1 and no filter.

    Returns:
        fp32 [B, ..., V], every row sums to 1. Rows that are not usable (see :func:`accept`) are one-hot.

    Raises:
        TypeError: not a floating-point tensor.
        ValueError: there is no token, or ``params`` is for another number of requests.
    """
    if not isinstance(logits, torch.Tensor) or not logits.is_floating_point():
        given = logits.dtype if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise TypeError(f"logits: expected a floating-point tensor, got {given}")
    check_dense("logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits: expected [B, ..., V] with V >= 1, got shape {tuple(logits.shape)}")
    values = logits.float()
    values = torch.where(values.isnan(), _NEVER, values)
    best = greedy_token(values)
    one_hot = torch.arange(values.shape[-1], device=values.device) == best.unsqueeze(-1)
    wrong = unusable(logits)
    top = values.amax(-1, keepdim=True)
    if params is None:
        scaled = values - top
    else:
        if params.batch != logits.shape[0]:
            raise ValueError(f"params: for {params.batch} requests, but logits have {logits.shape[0]}")
        temperature = _per_row(params.temperature, values)
        greedy = ~(temperature > GREEDY_TEMPERATURE)
        wrong = wrong | greedy.squeeze(-1)
        scaled = (values - top) / torch.where(greedy, 1.0, temperature)
    # A logit of -inf stays without weight even where the temperature is infinite.
    weights = torch.where(values == _NEVER, 0.0, scaled.exp())
    if params is not None and params.filters:
        weights = _filter(values, weights, params)
    weights = torch.where(wrong.unsqueeze(-1), one_hot.float(), weights)
    return weights / weights.sum(-1, keepdim=True)


def _per_row(field: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return field.reshape(-1, *[1] * (values.dim() - 1))


def _filter(values: torch.Tensor, weights: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Set the weights of tokens that a filter drops to 0. Each filter is a smallest value that is kept."""
    size = values.shape[-1]
    if params.top_k is not None or params.top_p is not None:
        order = values.argsort(-1, descending=True)
        ranked, sums = values.gather(-1, order), weights.gather(-1, order)
        if params.top_k is not None:
            k = _per_row(params.top_k.long(), values)
            k = torch.where((k <= 0) | (k > size), size, k)
            cut = ranked.gather(-1, (k - 1).expand(*values.shape[:-1], 1))
            weights = torch.where(values >= cut, weights, 0.0)
            sums = torch.where(ranked >= cut, sums, 0.0)
        if params.top_p is not None:
            sums = sums.cumsum(-1)
            need = _per_row(params.top_p, values) * sums[..., -1:]
            count = (sums < need).sum(-1, keepdim=True).clamp(max=size - 1)
            cut = ranked.gather(-1, count)
            # p = 1 keeps all, whatever rounding says.
            keep = (values >= cut) | (_per_row(params.top_p, values) >= 1)
            weights = torch.where(keep, weights, 0.0)
    if params.min_p is not None:
        # The largest weight is exactly 1.
        weights = torch.where(weights >= _per_row(params.min_p, values), weights, 0.0)
    return weights
