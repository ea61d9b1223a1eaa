"""A request's states outside of the pools: prefix caching, and exchange with code that keeps them in its own layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bole_runtime.families.spec import DATA_DTYPES
from bole_runtime.state.config import StateConfig
from bole_runtime.state.context import CallContext
from bole_runtime.state.request import RequestState
from bole_runtime.tree.check import check_dense


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What a slot held. Restoring it into any slot of a manager of the same config continues the request.

    Attributes:
        saved: states, convolution states and, if the chain was kept as it stood, ring and counters.
        config: of the manager that took it.
        contexts: what a kept chain needs of the calls that filled it.
    """

    saved: tuple[list[torch.Tensor], ...]
    config: StateConfig
    contexts: tuple[CallContext, ...]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for part in self.saved for t in part)


def take_snapshot(request: RequestState, config: StateConfig, slot: int, device: torch.device, chain: bool) -> Snapshot:
    """Copy a slot to tensors on ``device``."""
    return Snapshot(request.save(slot, device, chain and bool(request.chains)), config, tuple(request.contexts))


def restore_slot(request: RequestState, config: StateConfig, slot: int, snapshot: Snapshot) -> None:
    """Write a snapshot to a slot.

    Raises:
        TypeError: not a Snapshot.
        ValueError: it is of other layers, dtypes or chains.
    """
    if not isinstance(snapshot, Snapshot):
        raise TypeError(f"snapshot: expected a Snapshot, got {type(snapshot).__name__}")
    theirs = snapshot.config
    names = ["layers", "state_dtype", "conv_dtype"]
    if len(snapshot.saved) == 3:
        names += ["pending", "dtype"]
    for name in names:
        mine, other = getattr(config, name), getattr(theirs, name)
        if mine != other:
            raise ValueError(f"snapshot: of a manager with {name} = {other}, this one has {mine}")
    keeps_chain = len(snapshot.saved) == 3
    for n, (mine, other) in enumerate(zip(request.contexts, snapshot.contexts, strict=True)):
        changed = other.difference(mine) if keeps_chain else ""
        if changed:
            raise ValueError(f"snapshot: tokens in the chain of layer {n} were verified with {changed}")
    request.load(slot, snapshot.saved)
    for n, other in enumerate(snapshot.contexts):
        if keeps_chain and not request.contexts[n].called:
            request.contexts[n] = other


def export_slot(request: RequestState, slot: int, layout: str) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Return copies of the states of a slot: one [HV, dk, dv] (or [HV, dv, dk]) a layer, and one [C, W - 1] or None."""
    _check_layout(layout)
    states = [pool[slot].detach().clone() for pool in request.pools]
    convs = [None if pool is None else pool[slot].detach().clone() for pool in request.conv_pools]
    return [s.transpose(-1, -2).contiguous() for s in states] if layout == "dk_dv" else states, convs


def import_slot(
    request: RequestState,
    slot: int,
    states: Sequence[torch.Tensor],
    conv_states: Sequence[torch.Tensor | None] | None,
    layout: str,
) -> None:
    """Write the states of every layer of a slot.

    Raises:
        TypeError: not a list or tuple of tensors, or a dtype that no pool has.
        ValueError: a wrong number or shape.
    """
    _check_layout(layout)
    swap = layout == "dk_dv"
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    _check_count("states", states, len(request.pools))
    for n, (pool, state) in enumerate(zip(request.pools, states, strict=True)):
        _check_data(f"states[{n}]", state, pool)
        target = pool[slot].transpose(-1, -2) if swap else pool[slot]
        if state.shape != target.shape:
            raise ValueError(
                f"states[{n}]: expected shape {tuple(target.shape)} for layout {layout!r}, got {tuple(state.shape)}"
            )
        pairs.append((target, state))
    if conv_states is not None:
        _check_count("conv_states", conv_states, len(request.conv_pools))
        for n, (conv, given) in enumerate(zip(request.conv_pools, conv_states, strict=True)):
            if (conv is None) != (given is None):
                raise ValueError(f"conv_states[{n}]: expected {'None' if conv is None else 'a tensor'}")
            if conv is not None and given is not None:
                _check_data(f"conv_states[{n}]", given, conv)
                if given.shape != conv.shape[1:]:
                    raise ValueError(
                        f"conv_states[{n}]: expected shape {tuple(conv.shape[1:])}, got {tuple(given.shape)}"
                    )
                pairs.append((conv[slot], given))
    written = {target.untyped_storage().data_ptr() for target, _ in pairs}
    with torch.no_grad():
        # Views of the manager's own memory are read before anything is written.
        ready = [(t, v.clone() if v.untyped_storage().data_ptr() in written else v) for t, v in pairs]
        for target, value in ready:
            target.copy_(value)
    request.counters.clear(slot)


def _check_data(name: str, given: object, pool: torch.Tensor) -> None:
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(given).__name__}")
    check_dense(name, given)
    if given.is_meta and not pool.is_meta:
        raise ValueError(f"{name}: on the meta device, so it holds nothing to copy")
    if given.dtype not in DATA_DTYPES:
        raise TypeError(f"{name}: dtype {given.dtype} is not allowed; allowed: {', '.join(map(str, DATA_DTYPES))}")


def _check_layout(layout: str) -> None:
    if layout not in ("dk_dv", "dv_dk"):
        raise ValueError(f"layout: {layout!r} is not allowed; allowed: dk_dv, dv_dk")


def _check_count(name: str, given: object, count: int) -> None:
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{name}: expected a list or tuple with one a layer, got {type(given).__name__}")
    if len(given) != count:
        raise ValueError(f"{name}: {len(given)} for {count} layers")
