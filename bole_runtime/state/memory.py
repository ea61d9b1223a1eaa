"""Exact memory of a state manager before anything is allocated, against what snapshots of every node would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bole_runtime.state.buffers import RoundBuffers
from bole_runtime.state.chain_counters import ChainCounters
from bole_runtime.state.config import StateConfig, state_config
from bole_runtime.state.geometry import LayerGeometry
from bole_runtime.state.layout import token_layout
from bole_runtime.state.packing import packed_width
from bole_runtime.state.scratch import by_tables, most_scratch


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by lifetime.

    Attributes:
        states: request lifetime: recurrent pools of all slots and layers.
        conv_states: request lifetime: convolution pools.
        chains: request lifetime: rings of the pending chains, and their counters.
        factors: round lifetime: k, v and gates of every node of the batch, all layers.
        conv_inputs: round lifetime: raw inputs of the convolutions, all layers.
        scratch: lifetime of one layer's call, shared by the layers; what the kernel that takes most of those that calls
            up to the capacities can choose needs, with and without ``qk_l2norm``. 0 without a GPU in sight.
        snapshots: what keeping a state for each of these nodes instead would take (recurrent states alone).
        conv_snapshots: the same for convolution states.
        nodes: of the batch.
    """

    states: int
    conv_states: int
    chains: int
    factors: int
    conv_inputs: int
    scratch: int
    snapshots: int
    conv_snapshots: int
    nodes: int

    @property
    def request(self) -> int:
        """Bytes that live as long as requests."""
        return self.states + self.conv_states + self.chains

    @property
    def round(self) -> int:
        """Bytes that live for a round."""
        return self.factors + self.conv_inputs

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.request + self.round + self.scratch

    @property
    def ratio(self) -> float:
        """How many times smaller the factors of a node are than a snapshot of its recurrent state."""
        return self.snapshots / self.factors

    def __str__(self) -> str:
        rows = (
            ("request", "recurrent states", self.states),
            ("request", "convolution states", self.conv_states),
            ("request", "pending chains", self.chains),
            ("round", "state factors", self.factors),
            ("round", "convolution inputs", self.conv_inputs),
            ("layer", "scratch", self.scratch),
            ("", "total", self.total),
            ("", f"snapshots of {self.nodes} nodes instead", self.snapshots + self.conv_snapshots),
        )
        lines = [f"{life:<8} {what:<36} {size / 2**20:>12.2f} MiB" for life, what, size in rows]
        return "\n".join(lines) + f"\nrecurrent state of a node {self.ratio:.1f} times smaller than a snapshot"


def plan_memory(
    layers: Sequence[LayerGeometry], *, gpu: str | None = None, batch_invariant: bool = False, **sizes: Any
) -> MemoryPlan:
    """Return the bytes that a :class:`~bole_runtime.StateManager` with these arguments allocates.

    Args:
        layers: geometry of every recurrent layer, of this rank.
        gpu: key of a GPU record (``h200``), whose kernels' scratch memory counts in; default: no scratch.
        batch_invariant: as for the manager: all calls take one kernel, and its scratch memory.
        **sizes: those of :class:`~bole_runtime.StateManager`: slots, max_batch, max_nodes, max_total, policy, pending,
            dtypes and so on.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a size or name is out of range.

    Example:
        >>> layer = LayerGeometry(16, 32, 128, 128, conv_width=4)
        >>> print(plan_memory([layer] * 24, slots=64, max_batch=64, max_nodes=64, max_total=1024))
    """
    config = state_config(layers, **sizes)
    return memory_of(config, 0 if gpu is None else _scratch(config, gpu, batch_invariant))


def memory_of(config: StateConfig, scratch: int = 0) -> MemoryPlan:
    """Return the bytes that a checked config needs."""
    convolved = [layer for layer in config.layers if layer.conv_width]
    conv_shapes = [(layer.channels, layer.conv_width - 1) for layer in convolved]
    state_shapes = [layer.state_shape for layer in config.layers]
    state, conv = packed_width(state_shapes), packed_width(conv_shapes)
    chains = 0
    if config.pending:
        chains = config.slots * sum(token_layout(y, config.dtype).ring_nbytes(config.pending) for y in config.layers)
    factors, inputs = RoundBuffers.nbytes(config)
    exact_state = sum(a * b * c for a, b, c in state_shapes)
    exact_conv = sum(a * b for a, b in conv_shapes)
    return MemoryPlan(
        states=config.slots * state * config.state_dtype.itemsize,
        conv_states=config.slots * conv * config.conv_dtype.itemsize,
        chains=chains + ChainCounters.nbytes(config.slots),
        factors=factors,
        conv_inputs=inputs,
        scratch=scratch,
        snapshots=config.max_total * exact_state * config.state_dtype.itemsize,
        conv_snapshots=config.max_total * exact_conv * config.conv_dtype.itemsize,
        nodes=config.max_total,
    )


def _scratch(config: StateConfig, gpu: str, batch_invariant: bool) -> int:
    from bole_runtime import gpus

    record = gpus.get(gpu)
    return 4 * most_scratch(config, by_tables(record.device_names[0], record.limits()), batch_invariant)
