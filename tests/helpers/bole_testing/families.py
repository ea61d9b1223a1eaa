"""Random inputs of every family, drawn from its declaration, and the check of a random problem."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from bole_runtime.factors import Factors, PendingChain
from bole_runtime.families import InputSpec, RecurrenceSpec, get_family
from bole_runtime.tree import TreeBatch
from bole_testing.cases.base import NAN, Inputs, Setup, dense_tree, make_inputs, packed_tree, random_parents
from bole_testing.cases.checks import check_commit, check_verify
from bole_testing.cases.draws import Draw


def draw_input(
    i: InputSpec, mode: str, lead: Sequence[int], heads: tuple[int, int], dims: tuple[int, int], gen: torch.Generator
) -> torch.Tensor:
    """Return one gate input or parameter, fp32, in the range of trained models.

    Log-decays differ a thousandfold from head to head and from channel to channel.
    """
    shape = (*(lead if i.shape[0] == "node" else ()), *i.sizes(heads, dims))
    x = torch.randn(shape, generator=gen)
    if i.name == "A_log":
        return torch.rand(shape, generator=gen).mul(16).add(0.1).log()
    if i.name == "dt_bias":
        return x - 3
    if mode == "ready" and i.role == "log_decay":
        rates = torch.tensor([0.01, 0.1, 1.0, 3.0, 0.03]).repeat(shape[-1])[: shape[-1]]
        return -torch.rand(shape, generator=gen) * rates
    if mode == "ready" and i.role in ("write_gate", "erase_gate"):
        return torch.sigmoid(x)
    if i.role in ("erase_key", "erase_write"):
        x = x / x.norm(dim=-1, keepdim=True)
        return x if i.role == "erase_key" else 0.5 * x
    return x


def draw_gates(
    spec: RecurrenceSpec, mode: str, lead: Sequence[int], heads: tuple[int, int], dims: tuple[int, int],
    gen: torch.Generator,
) -> dict[str, Any]:  # fmt: skip
    """Return every tensor that ``gates`` may hold in a mode, fp32."""
    tensors = (*spec.node_gates(mode), *spec.parameters(mode))
    return {i.name: draw_input(i, mode, lead, heads, dims, gen) for i in tensors}


def family_inputs(
    setup: Setup,
    spec: RecurrenceSpec,
    tree: TreeBatch,
    *,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (24, 20),
    mode: str = "ready",
    slots: Sequence[int] | None = None,
    pool_slots: int | None = None,
    seed: int = 0,
    gates: dict[str, Any] | None = None,
    **options: Any,
) -> Inputs:
    """Return random inputs of a layer of a family; NaN in everything that is not live.

    ``gates`` replaces or adds some of the drawn ones. Further arguments are those of verify.
    """
    inputs = make_inputs(setup, tree, heads=heads, dims=dims, slots=slots, pool_slots=pool_slots, seed=seed, **options)
    drawn = draw_gates(spec, mode, tree.lead, heads, dims, torch.Generator().manual_seed(seed + 1))
    dead = tree.depths.cpu() < 0
    if not tree.is_packed:
        dead = dead | (inputs.slots.cpu() < 0).unsqueeze(1)
    made: dict[str, Any] = {}
    for name, value in {**drawn, **(gates or {})}.items():
        if isinstance(value, torch.Tensor) and spec.by_name[name].shape[0] == "node":
            value = value.clone()
            value[dead] = NAN
        made[name] = value.to(setup.device) if isinstance(value, torch.Tensor) else value
    return inputs.replace(gates=made, options={**inputs.options, "recurrence": spec})


def family_pending(
    setup: Setup, spec: RecurrenceSpec, mode: str, inputs: Inputs, capacity: int, lengths: Sequence[int],
    starts: Sequence[int], seed: int = 7,
) -> PendingChain:  # fmt: skip
    """Return a pending chain of random tokens; rows outside it hold NaN."""
    gen = torch.Generator().manual_seed(seed)
    total = inputs.state.shape[0]
    k = torch.randn(total, capacity, *inputs.k.shape[-2:], generator=gen)
    v = torch.randn(total, capacity, *inputs.v.shape[-2:], generator=gen)
    kept = spec.kept_mode(mode)
    heads, dims = (k.shape[-2], v.shape[-2]), (k.shape[-1], v.shape[-1])
    gates = {i.name: draw_input(i, kept, (total, capacity), heads, dims, gen) for i in spec.node_gates(kept)}
    for s in range(total):
        used = {(starts[s] + t) % capacity for t in range(lengths[s])}
        unused = [i for i in range(capacity) if i not in used]
        for t in (k, v, *gates.values()):
            t[s, unused] = NAN
    return PendingChain(
        k.to(setup.in_dtype).to(setup.device),
        v.to(setup.in_dtype).to(setup.device),
        {name: t.to(torch.promote_types(setup.in_dtype, t.dtype)).to(setup.device) for name, t in gates.items()},
        torch.tensor(list(lengths), dtype=torch.int32, device=setup.device),
        torch.tensor(list(starts), dtype=torch.int32, device=setup.device),
    )


def repeat_key(inputs: Inputs, strength: float) -> None:
    """Make all tokens of one key, which erases what is at it as strongly as given, without decay."""
    inputs.k.copy_(inputs.k[:, :1].clone().expand_as(inputs.k))
    gates = inputs.gates
    gates["g"].zero_()
    for gate in ("beta", "erase"):
        if gate in gates:
            gates[gate].fill_(strength)
    if "p" in gates:
        gates["p"].copy_(inputs.k)
    if "a" in gates:
        gates["a"].copy_(gates["a"][:, :1].clone().expand_as(gates["a"]))
        gates["b"].copy_(-strength * gates["a"])


def run_family_draw(setup: Setup, name: str, draw: Draw) -> None:
    """Verify and commit one random problem of a family and compare both with the float64 recurrence."""
    spec, rng = get_family(name), random.Random(draw.seed)
    mode = draw.mode if draw.mode in spec.modes else "ready"
    rows = [random_parents(rng, n, padding=draw.padding) for n in draw.sizes]
    if draw.packed:
        tree = packed_tree(setup, rows, max_nodes=max(draw.sizes) + rng.randrange(3), spare=rng.randrange(3))
    else:
        most = max(draw.sizes)
        tree = dense_tree(setup, [row + [-2] * (most - len(row)) for row in rows])
    batch = len(rows)
    slots = rng.sample(range(batch + 2), batch)
    if draw.dead:
        slots[rng.randrange(batch)] = -1
    inputs = family_inputs(
        setup, spec, tree, heads=draw.heads, dims=draw.dims, mode=mode, slots=slots, pool_slots=batch + 2,
        seed=draw.seed,
    )  # fmt: skip
    if draw.pending:
        lengths = [rng.randint(0, draw.pending) for _ in range(batch + 2)]
        starts = [rng.randrange(draw.pending) for _ in range(batch + 2)]
        pending = family_pending(setup, spec, mode, inputs, draw.pending, lengths, starts, seed=draw.seed)
        inputs = inputs.replace(options={**inputs.options, "pending": pending})
    buffers = None
    if draw.capture:
        buffers = Factors.allocate(
            tree, key_heads=draw.heads[0], value_heads=draw.heads[1], dk=draw.dims[0], dv=draw.dims[1],
            dtype=setup.in_dtype, recurrence=spec, gate_mode=mode,
        )  # fmt: skip
        for t in (buffers.k, buffers.v, *buffers.gates.values()):
            t.fill_(NAN)
    factors = check_verify(setup, inputs, capture=buffers)
    live = [[i for i, p in enumerate(row) if p != -2] for row in rows]
    check_commit(setup, inputs, factors, [rng.choice([-1, *nodes, *nodes]) for nodes in live])
