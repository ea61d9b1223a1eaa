"""Bole's runtime: verify proposal trees through recurrent layers and commit the accepted state."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from bole_runtime.api import commit, verify
    from bole_runtime.backend_choice import set_backend
    from bole_runtime.budget import allocate, calibrate
    from bole_runtime.conv import ConvFactors, ConvPending, conv_commit, tree_conv
    from bole_runtime.factors import Factors, PendingChain
    from bole_runtime.families import RecurrenceSpec, get_family, register_family
    from bole_runtime.kernels.space import Config
    from bole_runtime.sampling import Acceptance, SamplingParams, accept, accept_predicted
    from bole_runtime.state import LayerGeometry, MemoryPlan, Snapshot, StateManager, append, flush, plan_memory
    from bole_runtime.tree import TreeBatch
    from bole_runtime.warming import warmup

# Imported at first use: `import bole_runtime` stays light, and Triton loads only where something is launched.
_EXPORTS = {
    "Acceptance": "bole_runtime.sampling",
    "Config": "bole_runtime.kernels.space",
    "ConvFactors": "bole_runtime.conv",
    "ConvPending": "bole_runtime.conv",
    "Factors": "bole_runtime.factors",
    "LayerGeometry": "bole_runtime.state",
    "MemoryPlan": "bole_runtime.state",
    "PendingChain": "bole_runtime.factors",
    "RecurrenceSpec": "bole_runtime.families",
    "SamplingParams": "bole_runtime.sampling",
    "Snapshot": "bole_runtime.state",
    "StateManager": "bole_runtime.state",
    "TreeBatch": "bole_runtime.tree",
    "accept": "bole_runtime.sampling",
    "accept_predicted": "bole_runtime.sampling",
    "allocate": "bole_runtime.budget",
    "calibrate": "bole_runtime.budget",
    "append": "bole_runtime.state",
    "commit": "bole_runtime.api",
    "conv_commit": "bole_runtime.conv",
    "flush": "bole_runtime.state",
    "get_family": "bole_runtime.families",
    "plan_memory": "bole_runtime.state",
    "register_family": "bole_runtime.families",
    "set_backend": "bole_runtime.backend_choice",
    "tree_conv": "bole_runtime.conv",
    "verify": "bole_runtime.api",
    "warmup": "bole_runtime.warming",
}


def __getattr__(name: str) -> object:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'bole_runtime' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})


__all__ = [
    "Acceptance",
    "Config",
    "ConvFactors",
    "ConvPending",
    "Factors",
    "LayerGeometry",
    "MemoryPlan",
    "PendingChain",
    "RecurrenceSpec",
    "SamplingParams",
    "Snapshot",
    "StateManager",
    "TreeBatch",
    "__version__",
    "accept",
    "accept_predicted",
    "allocate",
    "append",
    "calibrate",
    "commit",
    "conv_commit",
    "flush",
    "get_family",
    "plan_memory",
    "register_family",
    "set_backend",
    "tree_conv",
    "verify",
    "warmup",
]
