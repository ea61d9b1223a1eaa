"""States of a model's recurrent layers over a serving loop: pools, factors, pending chains, commit policies.

Three lifetimes, a module each: a request's (:mod:`~bole_runtime.state.request`), a round's and a layer call's
(:mod:`~bole_runtime.state.buffers`). See docs/runtime.md.
"""

from __future__ import annotations

from bole_runtime.state.geometry import LayerGeometry, shard_channels, shard_heads
from bole_runtime.state.manager import StateManager
from bole_runtime.state.memory import MemoryPlan, plan_memory
from bole_runtime.state.operations import append, flush
from bole_runtime.state.round import Round
from bole_runtime.state.snapshot import Snapshot

__all__ = [
    "LayerGeometry",
    "MemoryPlan",
    "Round",
    "Snapshot",
    "StateManager",
    "append",
    "flush",
    "plan_memory",
    "shard_channels",
    "shard_heads",
]
