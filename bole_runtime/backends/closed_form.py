"""The tree closed form in torch: dense rows of one batch slice, vectorised over requests and value heads.

Rows are a chain of pending tokens followed by the nodes of the tree; every tensor here is already free of padding
garbage (dead rows are zero) and in the compute dtype. With G the log-decay summed over a row and its strict ancestors,
and G' = G, or G without the row's own where the erase sees the state before decay:

    e_i + sum over j of (f_i . e^(G'_i - G_j) o b_j) e_j
        = -S0 (e^G'_i o f_i) - sum over j of (f_i . e^(G'_i - G_j) o w_j) r_j
    o_i = S0 (e^G_i o q_i) + sum over j of (q_i . e^(G_i - G_j) o b_j) e_j + the same with w_j and r_j

j runs over strict ancestors, in o over i too. A delta rule has b = w: u = e + r is then all there is to solve for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bole_runtime.backends.decay import Decay, per_value_head
from bole_runtime.families.spec import Product, RecurrenceSpec


@dataclass(slots=True, eq=False)
class Vectors:
    """A key-like product of inputs, one a row: a vector times an optional weight.

    Attributes:
        vector: [B, HK or HV, M, dk].
        weight: [B, HV, M, 1], or None for 1.
    """

    vector: torch.Tensor
    weight: torch.Tensor | None


@dataclass(slots=True, eq=False)
class Rows:
    """Rows of a batch slice.

    Attributes:
        inputs: q (where outputs are wanted), k, v and the ready gates by name, normalised, zero in dead rows: [B, M, H]
            or [B, M, H, d]. Per-head parameters are [HV] or [HV, d]. The log-decay is float64.
        mask: bool [B, M, M], row i marks i and its strict ancestors; all false in dead rows.
        heads: HV.
    """

    inputs: dict[str, torch.Tensor]
    mask: torch.Tensor
    heads: int


def weighted(weight: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Return ``weight * x``."""
    return x if weight is None else weight * x


def _keys(spec: RecurrenceSpec, rows: Rows, product: Product, sign: float = 1.0) -> Vectors:
    """Return a product with vectors of dk. Per-node values a head stay apart: Gram matrices of key heads are shared."""
    vector = weight = None
    for name in product:
        x = rows.inputs[name].transpose(1, 2)
        if len(spec.by_name[name].shape) == 2:
            weight = weighted(weight, x.unsqueeze(-1))
        elif vector is None:
            vector = x
        else:
            vector = per_value_head(vector, rows.heads) * per_value_head(x, rows.heads)
    assert vector is not None
    if sign != 1.0:
        vector = vector * sign
    return Vectors(vector, weight)


def _values(spec: RecurrenceSpec, rows: Rows, product: Product) -> torch.Tensor:
    """Return a product with vectors of dv, [B, HV, M, dv]."""
    value: torch.Tensor | None = None
    for name in product:
        x, shape = rows.inputs[name], spec.by_name[name].shape
        if shape[0] != "node":
            x = x.reshape(1, rows.heads, 1, -1)
        else:
            x = per_value_head((x.unsqueeze(-1) if len(shape) == 2 else x).transpose(1, 2), rows.heads)
        value = weighted(value, x)
    assert value is not None
    return value


def _decay(spec: RecurrenceSpec, rows: Rows) -> Decay:
    gate = spec.log_decay
    if gate is None:
        return Decay(None, rows.mask, rows.heads, rows.inputs["v"].dtype)
    g = rows.inputs[gate.name]
    if spec.decay == "head":
        live = rows.mask.any(-1).unsqueeze(-1)
        g = torch.where(live, g, 0)
    return Decay(g, rows.mask, rows.heads, rows.inputs["v"].dtype)


def _updates(
    spec: RecurrenceSpec, rows: Rows, state: torch.Tensor, decay: Decay
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what every row adds to the state: pairs of values [B, HV, M, dv] and keys [B, HK or HV, M, dk]."""
    write = _keys(spec, rows, spec.write_key)
    value = _values(spec, rows, spec.write_value)
    if spec.erase == "none":
        return [(weighted(write.weight, value), write.vector)]
    before = spec.erase == "undecayed"
    erase = _keys(spec, rows, spec.erase_key, -spec.erase_sign)
    where = _keys(spec, rows, spec.erase_write)
    # The diagonal is taken as one by the solver, whatever is stored there.
    system = weighted(erase.weight, decay.gram(erase.vector, where.vector, before))
    if where.weight is not None:
        system = system * where.weight.transpose(-1, -2)
    seen = weighted(erase.weight, decay.scaled(erase.vector, before) @ state.transpose(-1, -2))
    if spec.merged:
        u = torch.linalg.solve_triangular(system, value - seen, upper=False, unitriangular=True)
        return [(weighted(write.weight, u), write.vector)]
    added = weighted(write.weight, value)
    cross = weighted(erase.weight, decay.gram(erase.vector, write.vector, before, strict=True))
    e = torch.linalg.solve_triangular(system, -seen - cross @ added, upper=False, unitriangular=True)
    return [(weighted(where.weight, e), where.vector), (added, write.vector)]


def outputs(spec: RecurrenceSpec, rows: Rows, q: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return o [B, N, HV, dv] of the last N rows.

    Args:
        spec: family.
        rows: the rows, M of them.
        q: [B, N, HK, dk], normalised and scaled, zero in dead rows.
        state: S0 [B, HV, dv, dk].
    """
    nodes = q.shape[1]
    decay = _decay(spec, rows)
    before = spec.output == "before"
    q = q.transpose(1, 2)
    out = decay.scaled(q, before) @ state.transpose(-1, -2)
    for value, key in _updates(spec, rows, state, decay):
        out = out + decay.gram(q, key, before, strict=before) @ value
    if spec.skip and all(name in rows.inputs for name in spec.skip):
        out = out + _values(spec, rows, spec.skip)[:, :, -nodes:]
    return out.transpose(1, 2)


def final_state(spec: RecurrenceSpec, rows: Rows, last: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return S [B, HV, dv, dk] at one row of each request.

    Args:
        spec: family.
        rows: the rows.
        last: int64 [B], the row whose state is wanted.
        state: S0 [B, HV, dv, dk].
    """
    decay = _decay(spec, rows)
    total, below = decay.to_row(last)
    new = state if total is None else state * total
    for value, key in _updates(spec, rows, state, decay):
        new = new + value.transpose(-1, -2) @ (per_value_head(key, rows.heads) * below)
    return new
