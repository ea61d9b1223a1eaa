"""The tree closed form in torch: dense rows of one batch slice, vectorised over requests and value heads.

Rows are a chain of pending tokens followed by the nodes of the tree; every tensor here is already free of padding
garbage (dead rows are zero) and in the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bole_runtime.families.spec import RecurrenceSpec

#: e^-10000 is 0 in float64 too, so clamping a log-decay there changes nothing and keeps the integer parts exact.
_MIN_LOG_DECAY = -1e4


@dataclass(slots=True, eq=False)
class Rows:
    """Rows of a batch slice.

    Attributes:
        k: [B, M, HK, dk], normalised, zero in dead rows.
        v: [B, M, HV, dv], zero in dead rows.
        log_decay: float64 [B, M, HV], zero in dead rows.
        beta: [B, M, HV], zero in dead rows.
        mask: bool [B, M, M], row i marks i and its strict ancestors; all false in dead rows.
    """

    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor
    mask: torch.Tensor


def per_value_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat dimension 1, key heads, for the value heads that read it."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def cumulative(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e^G [B, HV, M], and e^(G_i - G_j) [B, HV, M, M], zero where j is neither i nor an ancestor of i.

    G is summed in float64 and split into an integer and a fraction of at most one half, so a difference in the
    compute dtype is exact to the fraction's rounding whatever the size of G.
    """
    dtype = rows.v.dtype
    g = rows.log_decay.clamp(min=_MIN_LOG_DECAY)
    total = (rows.mask.double() @ g).transpose(1, 2)
    whole = total.round()
    part = (total - whole).to(dtype)
    whole = whole.to(dtype)
    difference = (whole[..., :, None] - whole[..., None, :]) + (part[..., :, None] - part[..., None, :])
    # Masked before exp: between unrelated nodes the difference can be large and positive.
    return total.exp().to(dtype), difference.masked_fill(~rows.mask.unsqueeze(1), float("-inf")).exp()


def pseudo_values(
    spec: RecurrenceSpec, rows: Rows, state: torch.Tensor, decay: torch.Tensor, pairs: torch.Tensor
) -> torch.Tensor:
    """Return u [B, HV, M, dv]: the solution of (I + A) U = diag(beta) (V - diag(e^G) K S0^T).

    Args:
        spec: family; ``erase`` decides whether there is anything to solve.
        rows: the rows.
        state: S0 [B, HV, dv, dk].
        decay: e^G.
        pairs: e^(G_i - G_j).
    """
    if spec.erase != "decayed":
        raise NotImplementedError(f"the torch backend has no closed form for erase = {spec.erase!r} yet")
    heads = rows.v.shape[2]
    beta = rows.beta.transpose(1, 2).unsqueeze(-1)
    k = rows.k.transpose(1, 2)
    gram = per_value_head(k @ k.transpose(-1, -2), heads)
    # The diagonal is taken as one by the solver, whatever is stored there.
    system = beta * pairs * gram
    rhs = beta * (rows.v.transpose(1, 2) - decay.unsqueeze(-1) * (per_value_head(k, heads) @ state.transpose(-1, -2)))
    u: torch.Tensor = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    return u


def outputs(spec: RecurrenceSpec, rows: Rows, q: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return o [B, N, HV, dv] of the last N rows.

    Args:
        spec: family.
        rows: the rows, M of them.
        q: [B, N, HK, dk], normalised and scaled, zero in dead rows.
        state: S0 [B, HV, dv, dk].
    """
    heads, nodes = rows.v.shape[2], q.shape[1]
    decay, pairs = cumulative(rows)
    u = pseudo_values(spec, rows, state, decay, pairs)
    q = q.transpose(1, 2)
    weights = pairs[:, :, -nodes:] * per_value_head(q @ rows.k.permute(0, 2, 3, 1), heads)
    from_state = decay[..., -nodes:, None] * (per_value_head(q, heads) @ state.transpose(-1, -2))
    return (from_state + weights @ u).transpose(1, 2)


def final_state(spec: RecurrenceSpec, rows: Rows, last: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return S [B, HV, dv, dk] at one row of each request.

    Args:
        spec: family.
        rows: the rows.
        last: int64 [B], the row whose state is wanted.
        state: S0 [B, HV, dv, dk].
    """
    heads = rows.v.shape[2]
    decay, pairs = cumulative(rows)
    u = pseudo_values(spec, rows, state, decay, pairs)
    at = torch.arange(last.shape[0], device=last.device)
    weights = pairs[at, :, last]
    k = per_value_head(rows.k.transpose(1, 2), heads)
    return decay[at, :, last, None, None] * state + (u * weights.unsqueeze(-1)).transpose(-1, -2) @ k
