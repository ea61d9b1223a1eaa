"""Commits of all layers, worked out once: one call of the backend for the layers of one geometry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from bole_runtime.backends import get_backend
from bole_runtime.calls import CommitCall, CommitLayer
from bole_runtime.factors import Factors, PendingChain
from bole_runtime.state.context import CallContext
from bole_runtime.state.geometry import LayerGeometry

if TYPE_CHECKING:
    from bole_runtime.state.manager import StateManager
    from bole_runtime.state.round import Round

Launch = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], None]


class PreparedLayers:
    """Launches of some layers, for slots, accepted nodes and actions that are given at each call."""

    def __init__(self, launches: list[Launch], parts: Sequence[Factors]) -> None:
        self._launches = launches
        # Most families' factors hold nothing of a call but whether keys are normalised: nothing to compare every round.
        self._contexts = [
            CallContext.of_factors(p) if p.spec.parameters(p.gate_mode) or p.spec.options(p.gate_mode) else None
            for p in parts
        ]
        self._l2norm = [part.qk_l2norm for part in parts]

    def serves(self, factors: Sequence[Factors | None]) -> bool:
        """Whether the factors of a round are those that this was prepared for; the buffers always are."""
        for part, l2norm, context in zip(factors, self._l2norm, self._contexts, strict=True):
            if part is None or part.qk_l2norm != l2norm:
                return False
            if context is not None and not context.same(CallContext.of_factors(part)):
                return False
        return True

    def __call__(self, slots: torch.Tensor, accepted: torch.Tensor, actions: torch.Tensor | None) -> None:
        for launch in self._launches:
            launch(slots, accepted, actions)


def prepare_layers(
    manager: StateManager,
    round_: Round,
    factors: Sequence[Factors | None],
    chains: Sequence[PendingChain],
    numbers: Sequence[int] | None = None,
) -> PreparedLayers:
    """Work out the commits of some layers.

    Args:
        manager: pools, and the choice of kernels.
        round_: tree, and tensors of the batch's shape.
        factors: one a layer.
        chains: one a layer, or none.
        numbers: of the layers; default, all.
    """
    numbers = range(len(factors)) if numbers is None else numbers
    config = manager.config
    groups: dict[LayerGeometry, list[CommitLayer]] = {}
    parts: list[Factors] = []
    for i, n in enumerate(numbers):
        part = factors[i]
        assert part is not None
        part = part.replace(pending=chains[i] if chains else None)
        parts.append(part)
        groups.setdefault(config.layers[n], []).append(CommitLayer(manager.request.pools[n], part))
    launches: list[Launch] = []
    for layers in groups.values():
        backend = get_backend(round_.tree.device, layers[0].factors.spec)
        call = CommitCall(
            layers[0].factors.spec, tuple(layers), round_.slots, round_.slots, round_.tree, config.precision
        )  # fmt: skip
        call.variant = manager.kernels.of_commit(call)
        launches.append(backend.prepare(call) if backend.prepare is not None else _plain(call, backend.commit))
    return PreparedLayers(launches, parts)


def _plain(call: CommitCall, commit: Callable[[CommitCall], None]) -> Launch:
    def launch(slots: torch.Tensor, accepted: torch.Tensor, actions: torch.Tensor | None) -> None:
        commit(
            CommitCall(call.spec, call.layers, slots, accepted, call.tree, call.precision, call.variant, actions)
        )  # fmt: skip

    return launch
