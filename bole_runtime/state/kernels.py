"""Which kernels a manager's calls take, and the scratch memory they need: looked up once a size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from bole_runtime.backend_choice import backend_name
from bole_runtime.state.config import StateConfig

if TYPE_CHECKING:
    from bole_runtime.calls import CommitCall
    from bole_runtime.kernels.problem import Problem
    from bole_runtime.kernels.space import Config
    from bole_runtime.state.geometry import LayerGeometry
    from bole_runtime.tree import TreeBatch


class Kernels(NamedTuple):
    """Of one verification: fp32 elements of scratch memory, and a pinned configuration or None."""

    scratch: int
    variant: Config | None


class KernelChoice:
    """Kernels by size; the torch and reference backends have nothing to choose.

    In batch-invariant mode the kernel is that of the manager's largest batch whatever the batch of the round, so that a
    request is computed by the same code alone and in any batch.
    """

    def __init__(self, config: StateConfig, device: torch.device, batch_invariant: bool) -> None:
        self._config = config
        self._device = device
        self._pinned = batch_invariant
        self._known: dict[tuple[object, ...], Kernels] = {}

    def of_verify(
        self, geometry: LayerGeometry, gates: Mapping[str, object], tree: TreeBatch, l2norm: bool | None
    ) -> Kernels:
        """Return the kernels of a layer's verification; nothing for gates that fit no mode, which it then refuses."""
        spec = geometry.spec
        mode = next((m for m in spec.modes if spec.required[m] <= gates.keys() <= spec.allowed[m]), None)
        if mode is None or not spec.kernels or backend_name(self._device) != "triton":
            return Kernels(0, None)
        norm = spec.qk_l2norm if l2norm is None else l2norm
        key = (geometry, mode, tree.max_nodes, tree.max_depth, tree.max_batch, norm)
        made = self._known.get(key)
        if made is None:
            made = self._known[key] = self._look_up(geometry, mode, tree, norm)
        return made

    def _look_up(self, geometry: LayerGeometry, mode: str, tree: TreeBatch, l2norm: bool) -> Kernels:
        from bole_runtime.backends.triton_backend import select
        from bole_runtime.kernels.variants import get_variant, served

        batch = self._config.max_batch if self._pinned else tree.max_batch
        problem = verify_problem(self._config, geometry, mode, tree.max_nodes, tree.max_depth, batch, l2norm)
        if not served(problem):
            return Kernels(0, None)
        config, _ = select.choose(problem, self._device, None)
        sizes = get_variant("verify", config.variant).workspace(problem, config, tree.max_batch, geometry.value_heads)
        return Kernels(sum(sizes), config if self._pinned else None)

    def of_commit(self, call: CommitCall) -> Config | None:
        """Return the configuration to pin for a commit, or None."""
        if (
            not self._pinned
            or not call.spec.kernels
            or backend_name(self._device) != "triton"
            or not call.slots.shape[0]
        ):
            return None
        from bole_runtime.backends.triton_backend import select
        from bole_runtime.backends.triton_backend.commit import commit_problem
        from bole_runtime.kernels.problem import work_bucket

        layer = call.layers[0]
        problem = commit_problem(call, layer)
        work = work_bucket(self._config.max_batch, layer.factors.v.shape[-2])
        return select.choose(problem.replace(work=work), self._device, None)[0]


def verify_problem(
    config: StateConfig, geometry: LayerGeometry, mode: str, nodes: int, depth: int, batch: int, l2norm: bool
) -> Problem:
    """Return what the kernels of a layer's verification are specialised for."""
    from bole_runtime.backends.triton_backend.select import SHORT, buckets
    from bole_runtime.kernels.problem import Problem

    chain = config.pending if config.policy == "deferred" else 0
    sizes = buckets(nodes, depth, chain, batch, geometry.value_heads)
    return Problem(
        "verify",
        geometry.spec.name,
        geometry.dk,
        geometry.dv,
        geometry.value_heads // geometry.key_heads,
        SHORT[config.dtype],
        SHORT[config.state_dtype],
        mode,
        config.precision,
        *sizes,
        l2norm,
    )
