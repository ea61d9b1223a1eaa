"""Which kernels a manager's calls take, and the scratch memory they need: looked up once a size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from bole_runtime.backend_choice import backend_name
from bole_runtime.kernels.problem import NODE_BUCKETS, SMALL, row_buckets
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

    In batch-invariant mode the kernel is that of the manager's capacities whatever those of a round's tree, so that a
    request is computed by the same code alone and in any batch. Kernels are specialised for a bucket of nodes, which is
    why trees of another bucket are refused there (:meth:`check`).
    """

    def __init__(self, config: StateConfig, device: torch.device, batch_invariant: bool) -> None:
        self._config = config
        self._device = device
        self._pinned = batch_invariant
        self._known: dict[tuple[object, ...], Kernels] = {}
        self._convs: dict[tuple[object, ...], Config] = {}

    def check(self, tree: TreeBatch) -> None:
        """Check that the kernel of the manager's capacities can serve a tree, where that one is pinned.

        Raises:
            ValueError: it is for trees of another bucket of nodes.
        """
        chain = verified_chain(self._config)
        mine, theirs = (row_buckets("verify", n, chain)[0] for n in (self._config.max_nodes, tree.max_nodes))
        if self._pinned and mine != theirs:
            ends = (SMALL, *NODE_BUCKETS) if 0 < chain <= SMALL else NODE_BUCKETS
            least = next((b + 1 for b in reversed(ends) if b < mine), 1)
            raise ValueError(
                f"tree: max_nodes = {tree.max_nodes} takes another kernel than the manager's {self._config.max_nodes}, "
                f"so that bits would change with the capacity; allowed with batch_invariant: {least} to "
                f"{self._config.max_nodes}, with any max_batch, max_total and max_depth"
            )

    def of_verify(
        self, geometry: LayerGeometry, gates: Mapping[str, object], tree: TreeBatch, l2norm: bool | None
    ) -> Kernels:
        """Return the kernels of a layer's verification; nothing for gates that fit no mode, which it then refuses."""
        spec = geometry.spec
        mode = next((m for m in spec.modes if spec.required[m] <= gates.keys() <= spec.allowed[m]), None)
        if mode is None or not spec.kernels or backend_name(self._device) != "triton":
            return Kernels(0, None)
        norm = spec.qk_l2norm if l2norm is None else l2norm
        sizes = self._sizes(tree)
        key = (geometry, mode, sizes, tree.max_batch, norm)
        made = self._known.get(key)
        if made is None:
            made = self._known[key] = self._look_up(geometry, mode, sizes, tree.max_batch, norm)
        return made

    def _sizes(self, tree: TreeBatch) -> tuple[int, int, int]:
        """Return nodes, depth and batch that kernels are chosen for."""
        of = self._config if self._pinned else tree
        return of.max_nodes, of.max_depth, of.max_batch

    def _look_up(
        self, geometry: LayerGeometry, mode: str, sizes: tuple[int, int, int], batch: int, l2norm: bool
    ) -> Kernels:
        from bole_runtime.backends.triton_backend import select
        from bole_runtime.kernels.variants import get_variant, served

        problem = verify_problem(self._config, geometry, mode, *sizes, l2norm)
        if not served(problem):
            return Kernels(0, None)
        config, _ = select.choose(problem, self._device, None)
        scratch = get_variant("verify", config.variant).workspace(problem, config, batch, geometry.value_heads)
        return Kernels(sum(scratch), config if self._pinned else None)

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

        layer, config = call.layers[0], self._config
        problem = commit_problem(call, layer)
        # Trees of rounds are of the manager's bucket of nodes (see check), those of a flush always of the smallest.
        depth = min(config.max_depth, problem.nodes)
        _, depth, _, work = select.buckets(
            "commit", problem.nodes, depth, 0, config.max_batch, layer.factors.v.shape[-2]
        )
        return select.choose(problem.replace(work=work, depth=depth), self._device, None)[0]

    def of_conv(self, geometry: LayerGeometry, *, bias: bool, silu: bool, dynamic: bool) -> Config | None:
        """Return the configuration to pin for the convolution of a layer, or None."""
        if not self._pinned or backend_name(self._device) != "triton":
            return None
        key = (geometry, bias, silu, dynamic)
        if key not in self._convs:
            from bole_runtime.backends.triton_backend import select
            from bole_runtime.conv.triton_backend import _problem

            config, width = self._config, geometry.conv_width
            problem = _problem(
                "tree_conv", geometry.channels, width, width - 1, select.SHORT[config.dtype],
                select.SHORT[config.conv_dtype], bias, silu, dynamic, config.max_nodes, 0, config.max_batch,
            )  # fmt: skip
            self._convs[key] = select.choose(problem, self._device, None)[0]
        return self._convs[key]


def verified_chain(config: StateConfig) -> int:
    """Return the capacity of the chain that verifications go above."""
    return config.pending if config.policy == "deferred" else 0


def verify_problem(
    config: StateConfig, geometry: LayerGeometry, mode: str, nodes: int, depth: int, batch: int, l2norm: bool
) -> Problem:
    """Return what the kernels of a layer's verification are specialised for."""
    from bole_runtime.backends.triton_backend.select import SHORT, buckets
    from bole_runtime.kernels.problem import Problem

    chain = verified_chain(config)
    sizes = buckets("verify", nodes, depth, chain, batch, geometry.value_heads)
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
