"""Checks of the chains that ``flush`` and ``append`` are given. They read host metadata only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bole_runtime.factors import Factors, PendingChain
from bole_runtime.families import RecurrenceSpec
from bole_runtime.tree.check import check_dense
from bole_runtime.validate import check_tensor, not_a
from bole_runtime.validate_buffers import check_pending
from bole_runtime.validate_memory import refuse_overlaps


def mode_of(spec: RecurrenceSpec, chain: PendingChain) -> str:
    """Return the gate mode whose node gates a chain holds; the first where it holds those of none."""
    return next((m for m in spec.modes if chain.gates.keys() == {i.name for i in spec.node_gates(m)}), spec.modes[0])


def check_chain(spec: RecurrenceSpec, chain: PendingChain, name: str) -> None:
    """Check a chain that comes without a call: alone, before factors are made of it.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device, shape, stride or gate name.
    """
    if not isinstance(chain, PendingChain):
        not_a(name, chain, "a PendingChain")
    for what, ring in (("k", chain.k), ("v", chain.v)):
        if not isinstance(ring, torch.Tensor):
            not_a(f"{name}.{what}", ring, "a torch.Tensor")
        check_dense(f"{name}.{what}", ring)
        if ring.dim() != 4:
            layout = "[slots, capacity, heads, dimensions]"
            raise ValueError(f"{name}.{what}: expected {layout}, got shape {tuple(ring.shape)}")
    if not isinstance(chain.gates, Mapping):
        not_a(f"{name}.gates", chain.gates, "a mapping from gate names to tensors")
    check_tensor(f"{name}.v", chain.v, chain.k.device, (chain.k.dtype,))
    check_pending(spec, mode_of(spec, chain), chain, chain.k, chain.v, chain.k.shape[0], name)


def check_shared(chains: tuple[PendingChain, ...]) -> None:
    """Check that chains move on together.

    Raises:
        TypeError: not a chain.
        ValueError: chains of other counters or capacities.
    """
    for n, chain in enumerate(chains):
        if not isinstance(chain, PendingChain):
            not_a(f"pending[{n}]", chain, "a PendingChain")
        first = chains[0]
        same = chain.length.data_ptr() == first.length.data_ptr() and chain.start.data_ptr() == first.start.data_ptr()
        if not same or chain.capacity != first.capacity:
            raise ValueError(f"pending[{n}]: all layers must share length, start and capacity, which move on once")


def check_rings_apart(
    pools: Sequence[torch.Tensor],
    chains: Sequence[PendingChain],
    parts: Sequence[Factors],
    slots: torch.Tensor,
    accepted: torch.Tensor,
) -> None:
    """Check that an append writes to memory of its own: the rings, the counters and the pools, of which a row that does
    not fit is committed.

    Args:
        pools: one a layer.
        chains: of the layers; they share their counters.
        parts: factors of the layers.
        slots: of the call.
        accepted: of the call.

    Raises:
        ValueError: an overlap.
    """
    written = [*pools, chains[0].length, chains[0].start]
    read = [slots, accepted]
    for chain, part in zip(chains, parts, strict=True):
        written += (chain.k, chain.v, *chain.gates.values())
        read += (part.k, part.v, *part.gates.values())

    def names() -> tuple[list[str], list[str]]:
        of_written = [*_of_pools(pools), "pending.length", "pending.start"]
        of_read = ["slots", "accepted"]
        for n, (chain, part) in enumerate(zip(chains, parts, strict=True)):
            of_written += _of(f"factors[{n}].pending", chain)
            of_read += _of(f"factors[{n}]", part)
        return of_written, of_read

    refuse_overlaps(written, read, names)


def check_counters_apart(
    pools: Sequence[torch.Tensor], chains: Sequence[PendingChain], slots: torch.Tensor, rows: torch.Tensor | None
) -> None:
    """Check that a flush writes to memory of its own: the pools and the counters.

    Raises:
        ValueError: an overlap.
    """
    written = [*pools, chains[0].length, chains[0].start]
    read = [slots] if rows is None else [slots, rows]
    for chain in chains:
        read += (chain.k, chain.v, *chain.gates.values())

    def names() -> tuple[list[str], list[str]]:
        of_read = ["slots"] if rows is None else ["slots", "rows"]
        for n, chain in enumerate(chains):
            of_read += _of(f"pending[{n}]", chain)
        return [*_of_pools(pools), "pending.length", "pending.start"], of_read

    refuse_overlaps(written, read, names)


def _of_pools(pools: Sequence[torch.Tensor]) -> list[str]:
    return ["pool"] if len(pools) == 1 else [f"pool[{n}]" for n in range(len(pools))]


def _of(name: str, part: PendingChain | Factors) -> list[str]:
    return [f"{name}.k", f"{name}.v", *(f"{name}.gates[{gate!r}]" for gate in part.gates)]
