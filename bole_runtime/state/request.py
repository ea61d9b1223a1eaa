"""Lifetime of a request: states, convolution states and pending chains of every slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bole_runtime.factors import PendingChain
from bole_runtime.state.chain_counters import ChainCounters
from bole_runtime.state.config import StateConfig
from bole_runtime.state.context import CallContext
from bole_runtime.state.layout import token_layout
from bole_runtime.state.packing import Separate, SlotMajor
from bole_runtime.tree.check import check_dense
from bole_runtime.validate import check_state
from bole_runtime.validate_memory import check_apart


class RequestState:
    """Everything that a request owns between rounds.

    Attributes:
        pools: one recurrent pool a layer, [slots, HV, dv, dk].
        conv_pools: one convolution pool a layer, [slots, C, W - 1], oldest input first; None for a layer without one.
        chains: one pending chain a layer, which share ``length`` and ``start``; empty under the eager policy.
        counters: of the chains.
        contexts: what the chain of each layer needs of the calls that filled it.
    """

    def __init__(
        self,
        config: StateConfig,
        device: torch.device,
        pools: Sequence[torch.Tensor] | None = None,
        conv_pools: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        layers, slots = config.layers, config.slots
        self._buffers: list[SlotMajor | Separate] = []
        states = self._make(pools, slots, [layer.state_shape for layer in layers], config.state_dtype, device)
        self.pools: tuple[torch.Tensor, ...] = states.views
        convolved = [n for n, layer in enumerate(layers) if layer.conv_width]
        given = None if conv_pools is None else [conv_pools[n] for n in convolved]
        shapes = [(layers[n].channels, layers[n].conv_width - 1) for n in convolved]
        made = self._make(given, slots, shapes, config.conv_dtype, device)
        by_layer = dict(zip(convolved, made.views, strict=True))
        self.conv_pools = tuple(by_layer.get(n) for n in range(len(layers)))
        self.counters = ChainCounters(slots, device)
        self.contexts = [CallContext(layer.spec.qk_l2norm) for layer in layers]
        self.chains: tuple[PendingChain, ...] = ()
        self._states, self._convs, self._rings = states, made, list[SlotMajor]()
        if config.pending:
            self.chains = tuple(self._make_chains(config, device))

    def _make(
        self,
        given: Sequence[torch.Tensor | None] | None,
        slots: int,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> SlotMajor | Separate:
        if given is None:
            return SlotMajor(slots, shapes, dtype, device)
        return Separate([t for t in given if t is not None])

    def _make_chains(self, config: StateConfig, device: torch.device) -> list[PendingChain]:
        layouts = [token_layout(layer, config.dtype) for layer in config.layers]
        shapes = [layout.ring_shapes(config.pending) for layout in layouts]
        data = SlotMajor(config.slots, [s for pair in shapes for s in pair[0]], config.dtype, device)
        gates = SlotMajor(config.slots, [s for pair in shapes for s in pair[1]], layouts[0].gate_dtype, device)
        self._rings = [data, gates]
        views, kept = iter(data.views), iter(gates.views)
        return [
            PendingChain(
                next(views),
                next(views),
                {name: next(kept) for name, _ in layout.gates},
                self.counters.length,
                self.counters.start,
            )
            for layout in layouts
        ]

    def reset(self, slot: int) -> None:
        """Make a slot that of a new request: zero states, an empty chain."""
        self._states.zero(slot)
        self._convs.zero(slot)
        self.counters.clear(slot)

    def copy(self, target: int, source: int) -> None:
        """Copy everything of a slot, its chain as it stands included."""
        for buffer in (self._states, self._convs, *self._rings):
            buffer.copy(target, source)
        self.counters.copy(target, source)

    def save(self, slot: int, device: torch.device, chain: bool) -> tuple[list[torch.Tensor], ...]:
        """Return copies of a slot's states, convolution states and, if asked for, ring and counters."""
        saved = [self._states.save(slot, device), self._convs.save(slot, device)]
        if chain:
            rings = [t for ring in self._rings for t in ring.save(slot, device)]
            saved.append(
                [*rings, *(t[slot].to(device, copy=True) for t in (self.counters.length, self.counters.start))]
            )
        return tuple(saved)

    def load(self, slot: int, saved: Sequence[list[torch.Tensor]]) -> None:
        """Write what :meth:`save` returned; without a saved chain the slot's is emptied."""
        self._states.load(slot, saved[0])
        self._convs.load(slot, saved[1])
        if len(saved) == 2:
            self.counters.clear(slot)
            return
        for ring, value in zip(self._rings, saved[2], strict=False):
            ring.load(slot, [value])
        self.counters.length[slot].copy_(saved[2][-2])
        self.counters.start[slot].copy_(saved[2][-1])


def check_pools(
    config: StateConfig,
    device: torch.device,
    backend: str,
    pools: Sequence[torch.Tensor] | None,
    conv_pools: Sequence[torch.Tensor | None] | None,
) -> None:
    """Check pools that the caller owns against the config.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong number, device, shape or stride, or memory that two slots or two pools share.
    """
    for name, given in (("pools", pools), ("conv_pools", conv_pools)):
        if given is not None and not isinstance(given, (list, tuple)):
            raise TypeError(f"{name}: expected a list or tuple with one a layer, got {type(given).__name__}")
        if given is not None and len(given) != len(config.layers):
            raise ValueError(f"{name}: {len(given)} for {len(config.layers)} layers")
    for n, (pool, layer) in enumerate(zip(pools or (), config.layers, strict=False)):
        check_state(f"pools[{n}]", pool, device, *layer.state_shape, backend)
        if pool.shape[0] != config.slots or pool.dtype is not config.state_dtype:
            raise ValueError(
                f"pools[{n}]: {pool.shape[0]} slots of {pool.dtype}, expected {config.slots} of {config.state_dtype}"
            )
    for n, (conv, layer) in enumerate(zip(conv_pools or (), config.layers, strict=False)):
        shape = (config.slots, layer.channels, layer.conv_width - 1) if layer.conv_width else None
        if conv is not None and not isinstance(conv, torch.Tensor):
            raise TypeError(f"conv_pools[{n}]: expected a torch.Tensor or None, got {type(conv).__name__}")
        if conv is not None:
            check_dense(f"conv_pools[{n}]", conv)
        given_shape = None if conv is None else tuple(conv.shape)
        if given_shape != shape:
            raise ValueError(f"conv_pools[{n}]: expected {shape or 'None'}, got {given_shape}")
        if conv is not None and (conv.dtype is not config.conv_dtype or conv.device != device):
            raise ValueError(
                f"conv_pools[{n}]: {conv.dtype} on {conv.device}, expected {config.conv_dtype} on {device}"
            )
    own: list[tuple[str, torch.Tensor]] = []
    for name, given in (("pools", pools), ("conv_pools", conv_pools)):
        named = [(f"{name}[{n}]", pool) for n, pool in enumerate(given or ()) if pool is not None]
        if config.slots and len({pool.data_ptr() for _, pool in named}) != len(named):
            raise ValueError(f"{name}: two layers share a pool; every layer needs its own")
        own += named
    if own:
        check_apart(own, ())
