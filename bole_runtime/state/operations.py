"""Flush and append without a manager: for engines that keep pools and rings of their own."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from bole_runtime import validate as check
from bole_runtime import validate_values as values
from bole_runtime.backend_choice import backend_name
from bole_runtime.backends import get_backend
from bole_runtime.calls import CommitCall, CommitLayer
from bole_runtime.factors import Factors, PendingChain
from bole_runtime.families import RecurrenceSpec, get_family
from bole_runtime.state.chain_checks import check_chain, check_counters_apart, check_rings_apart, check_shared, mode_of
from bole_runtime.state.chain_counters import ChainCounters, ChainRule
from bole_runtime.state.chains import decide, flush_rows
from bole_runtime.state.context import CallContext
from bole_runtime.tree import TreeBatch
from bole_runtime.tree.check import check_dense, checks_values
from bole_runtime.validate_layers import check_layers

if TYPE_CHECKING:
    from bole_runtime.kernels.space import Config
    from bole_runtime.state.config import StateConfig
    from bole_runtime.state.geometry import LayerGeometry
    from bole_runtime.state.kernels import KernelChoice
    from bole_runtime.state.request import RequestState


@functools.lru_cache(maxsize=64)
def _kept_trees(batch: int, device: torch.device) -> TreeBatch:
    return TreeBatch(batch, 1, device=device)


def _no_nodes(batch: int, device: torch.device) -> TreeBatch:
    """Trees without a live node: what a flush is a commit of. Tensors of a tracer must not outlive it."""
    traced = type(torch.empty(0, device=device)) is not torch.Tensor
    return TreeBatch(batch, 1, device=device) if traced else _kept_trees(batch, device)


def flush_factors(spec: RecurrenceSpec, chain: PendingChain, tree: TreeBatch) -> Factors:
    """Return factors of a layer whose trees have no node, over memory of the chain; it is never read."""

    def rows(ring: torch.Tensor) -> torch.Tensor:
        return ring[:1, :1].expand(*tree.lead, *ring.shape[2:])

    mode = mode_of(spec, chain)
    gates = {name: rows(t) for name, t in chain.gates.items()}
    return Factors(spec, mode, rows(chain.k), rows(chain.v), gates, 1.0, spec.qk_l2norm, tree, chain)


def flush(
    pool: torch.Tensor | Sequence[torch.Tensor],
    slots: torch.Tensor,
    pending: PendingChain | Sequence[PendingChain],
    rows: torch.Tensor | None = None,
    *,
    recurrence: str | RecurrenceSpec = "gdn",
    gates: Mapping[str, torch.Tensor | float] | Sequence[Mapping[str, torch.Tensor | float]] | None = None,
    qk_l2norm: bool | None = None,
    precision: str = "lossless",
    variant: Config | None = None,
    validate: bool | None = None,
) -> None:
    """Fold pending chains alone into the states, in place, and empty them: no node is accepted.

    One launch for all layers of a geometry. Rows that do not flush, and rows whose chain is empty, keep their bits. No
    host sync on a device.

    Args:
        pool: [slots, HV, dv, dk], or one a layer, each with memory of its own.
        slots: int32 or int64 [B]; -1 marks a padding row. A live slot may occur once.
        pending: the chain, or one a layer; all share ``length`` and ``start``.
        rows: bool or int32 [B] on the device, which rows flush; None for all.
        recurrence: family of the layers.
        gates: of the calls that filled the chains, or one mapping a layer, for families whose chains hold gates as
            given; only their per-head parameters and floats are read.
        qk_l2norm: whether k is l2-normalised; default from the family.
        precision: ``lossless`` or ``fast``.
        variant: pin a kernel configuration of a commit.
        validate: check index values (a host sync on a device). Default: only for CPU tensors.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: a wrong shape, device, stride or value. Nothing has been written.
    """
    spec = recurrence if isinstance(recurrence, RecurrenceSpec) else get_family(recurrence)
    pools = (pool,) if isinstance(pool, torch.Tensor) else check.as_tuple("pool", pool, "a torch.Tensor")
    if isinstance(pending, PendingChain):
        chains: tuple[PendingChain, ...] = (pending,)
    else:
        chains = check.as_tuple("pending", pending, "a PendingChain")
    if len(pools) != len(chains) or not pools:
        raise ValueError(f"pool, pending: expected the same number of layers, got {len(pools)} and {len(chains)}")
    if not isinstance(slots, torch.Tensor):
        check.not_a("slots", slots, "a torch.Tensor")
    check_dense("slots", slots)
    slots = check.check_index("slots", slots, slots.device, slots.shape[0] if slots.dim() else -1)
    if precision not in check.PRECISIONS:
        raise ValueError(f"precision: {precision!r} is not allowed; allowed: {', '.join(check.PRECISIONS)}")
    if variant is not None:
        check.check_variant(variant)
    _check_rows(rows, slots)
    names = "pending" if len(chains) == 1 else "pending[{}]"
    for n, chain in enumerate(chains):
        check_chain(spec, chain, names.format(n))
    check_shared(chains)
    if pools[0].dim() == 4 and pools[0].shape[0] == 0:
        return
    tree = _no_nodes(slots.shape[0], slots.device)
    each: Sequence[Mapping[str, torch.Tensor | float]] = [{}] * len(chains)
    if gates is not None:
        each = (gates,) if isinstance(gates, Mapping) else check.as_tuple("gates", gates, "a mapping")
    for n, given in enumerate(each):
        if not isinstance(given, Mapping):
            check.not_a(f"gates[{n}]", given, "a mapping from gate names to tensors")
    if qk_l2norm is not None and not isinstance(qk_l2norm, bool):
        check.not_a("qk_l2norm", qk_l2norm, "a bool or None")
    if len(each) != len(chains):
        raise ValueError(f"gates: {len(each)} for {len(chains)} layers")
    parts = tuple(_part(spec, c, tree, g, qk_l2norm) for c, g in zip(chains, each, strict=True))
    layers = check_layers(pools, parts, backend_name(slots.device), names)
    check_counters_apart(pools, chains, slots, rows)
    if checks_values(validate, slots.device):
        values.check_slots(slots, pools[0].shape[0])
        values.check_pending_values(chains[0], slots)
        _check_distinct(slots)
    if not slots.shape[0]:
        return
    counters = ChainCounters.borrow(chains[0].length, chains[0].start)
    actions = torch.empty(slots.shape[0], dtype=torch.int32, device=slots.device)
    nothing = torch.full_like(actions, -1)
    flush_rows(counters, slots, rows, actions)
    call = CommitCall(spec, _before(layers, counters), slots, nothing, tree, precision, variant, actions)
    get_backend(slots.device, spec).commit(call)
    counters.give_back(chains[0].length, chains[0].start)


def append(
    pool: torch.Tensor | Sequence[torch.Tensor],
    slots: torch.Tensor,
    factors: Factors | Sequence[Factors],
    accepted: torch.Tensor,
    *,
    limit: int | None = None,
    precision: str = "lossless",
    variant: Config | None = None,
    validate: bool | None = None,
) -> torch.Tensor:
    """Put accepted paths behind the pending chains of their factors instead of into the states.

    A row whose chain would grow beyond ``limit`` is committed instead, chain and path, so that nothing is lost. One
    small launch decides, one for all layers of a geometry copies or commits; the counters move on once. No host sync on
    a device.

    Args:
        pool: the pool that was verified against, or one a layer.
        slots: int32 or int64 [B]; -1 marks a padding row. A live slot may occur once.
        factors: of the verification, with ``pending``; or one a layer. All chains share ``length`` and ``start``.
        accepted: int32 or int64 [B], request-local index of the terminal node; -1: nothing happens to the row.
        limit: most tokens of a chain, up to its capacity, which is the default.
        precision: ``lossless`` or ``fast``.
        variant: pin a kernel configuration of a commit.
        validate: check index values (a host sync on a device). Default: only for CPU tensors.

    Returns:
        int32 [B], what was done with each row: a :class:`bole_runtime.calls.RowAction`.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: a wrong shape, device, stride or value. Nothing has been written.
    """
    pools = (pool,) if isinstance(pool, torch.Tensor) else check.as_tuple("pool", pool, "a torch.Tensor")
    parts = (factors,) if isinstance(factors, Factors) else check.as_tuple("factors", factors, "a Factors")
    if len(pools) != len(parts) or not pools:
        raise ValueError(f"pool, factors: expected the same number of layers, got {len(pools)} and {len(parts)}")
    chains = []
    for n, part in enumerate(parts):
        if not isinstance(part, Factors):
            check.not_a(f"factors[{n}]", part, "a Factors")
        if part.pending is None:
            raise ValueError(f"factors[{n}]: verified without a pending chain, so there is none to append to")
        chains.append(part.pending)
    tree = parts[0].tree
    if not isinstance(tree, TreeBatch):
        check.not_a("factors[0].tree", tree, "a TreeBatch")
    slots = check.check_index("slots", slots, tree.device, tree.max_batch)
    accepted = check.check_index("accepted", accepted, tree.device, tree.max_batch)
    if precision not in check.PRECISIONS:
        raise ValueError(f"precision: {precision!r} is not allowed; allowed: {', '.join(check.PRECISIONS)}")
    if variant is not None:
        check.check_variant(variant)
    layers = check_layers(pools, parts, backend_name(tree.device))
    check_shared(tuple(chains))
    capacity = chains[0].capacity
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or not 0 <= limit <= capacity):
        raise ValueError(f"limit: {limit!r} is not allowed; allowed: 0 to the capacity of the chains, {capacity}")
    check_rings_apart(pools, chains, parts, slots, accepted)
    if checks_values(validate, tree.device):
        values.check_status(tree)
        values.check_slots(slots, min(p.shape[0] for p in pools))
        values.check_accepted(accepted, slots, tree)
        values.check_pending_values(chains[0], slots)
    actions = torch.zeros(tree.max_batch, dtype=torch.int32, device=tree.device)
    if not tree.max_batch or not pools[0].shape[0]:
        return actions
    counters = ChainCounters.borrow(chains[0].length, chains[0].start)
    rule = ChainRule(capacity, capacity if limit is None else limit, consumed=False)
    decide(counters, rule, tree, slots, accepted, actions)
    call = CommitCall(parts[0].spec, _before(layers, counters), slots, accepted, tree, precision, variant, actions)
    get_backend(tree.device, parts[0].spec).commit(call)
    counters.give_back(chains[0].length, chains[0].start)
    return actions


def flush_slots(request: RequestState, config: StateConfig, kernels: KernelChoice, slots: torch.Tensor) -> None:
    """Fold the chains of some slots of a manager into their states; one launch a geometry."""
    counters = request.counters
    actions = torch.empty(slots.shape[0], dtype=torch.int32, device=slots.device)
    flush_rows(counters, slots, None, actions)
    tree, nothing = _no_nodes(slots.shape[0], slots.device), torch.full_like(actions, -1)
    groups: dict[LayerGeometry, list[CommitLayer]] = {}
    for n, (layer, chain) in enumerate(zip(config.layers, request.chains, strict=True)):
        part = flush_factors(layer.spec, counters.before(chain), tree)
        if not request.contexts[n].serves(layer.spec, part.gate_mode):
            continue
        part = request.contexts[n].apply(part)
        groups.setdefault(layer, []).append(CommitLayer(request.pools[n], part))
    for layer, layers in groups.items():
        call = CommitCall(layer.spec, tuple(layers), slots, nothing, tree, config.precision, None, actions)
        # How many slots are flushed together must not show in their bits where a round's batch does not.
        call.variant = kernels.of_commit(call)
        get_backend(slots.device, layer.spec).commit(call)


def _part(
    spec: RecurrenceSpec,
    chain: PendingChain,
    tree: TreeBatch,
    gates: Mapping[str, torch.Tensor | float],
    l2norm: bool | None,
) -> Factors:
    part = flush_factors(spec, chain, tree)
    every = (spec.node_gates, spec.parameters, spec.options)
    known = {i.name for mode in spec.modes for inputs in every for i in inputs(mode)}
    if unknown := sorted(map(str, gates.keys() - known)):
        raise ValueError(
            f"gates: {', '.join(unknown)} is no gate of {spec.name!r}; it has {', '.join(sorted(known)) or 'none'}"
        )
    missing = spec.required[part.gate_mode] - {i.name for i in spec.node_gates(part.gate_mode)} - gates.keys()
    if missing:
        raise ValueError(
            f"gates: missing {', '.join(sorted(missing))}, which the chains of {spec.name!r} with {part.gate_mode!r} "
            "gates need of the calls that filled them"
        )
    for i in spec.parameters(part.gate_mode):
        if i.name in gates:
            given = check.check_tensor(f"gates['{i.name}']", gates[i.name], chain.k.device, i.dtypes)
            sizes = i.sizes((chain.k.shape[-2], chain.v.shape[-2]), (chain.k.shape[-1], chain.v.shape[-1]))
            if given.shape != sizes:
                check.wrong_shape(f"gates['{i.name}']", given, sizes, "that of the calls")
            check.check_last_stride(f"gates['{i.name}']", given)
    for i in spec.options(part.gate_mode):
        check.check_option(i, gates.get(i.name, i.default))
    return CallContext.of_gates(spec, part.gate_mode, gates, l2norm).apply(part)


def _before(layers: Sequence[CommitLayer], counters: ChainCounters) -> tuple[CommitLayer, ...]:
    """Return the layers with their chains as they were before the counters moved on."""
    made = []
    for layer in layers:
        chain = layer.factors.pending
        assert chain is not None
        made.append(CommitLayer(layer.pool, layer.factors.replace(pending=counters.before(chain))))
    return tuple(made)


def _check_rows(rows: torch.Tensor | None, slots: torch.Tensor) -> None:
    if rows is None:
        return
    check.check_tensor("rows", rows, slots.device, (torch.bool, torch.int32))
    if rows.shape != slots.shape:
        check.wrong_shape("rows", rows, tuple(slots.shape), "one entry a row of slots")


def _check_distinct(slots: torch.Tensor) -> None:
    live = [s for s in slots.tolist() if s >= 0]
    if len(set(live)) != len(live):
        raise ValueError(f"slots: a slot occurs twice in {live}; every flush writes its slot once")
