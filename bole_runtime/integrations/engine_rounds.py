"""Rounds of an engine that keeps the states itself: its pools, its slots, its trees, one capture for each batch size.

A CUDA graph of the engine holds the forward, whose Python runs once; the commit runs outside it, every round. So what a
round needs is kept by batch size: the tree, and views of factor buffers that all batch sizes share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from bole_runtime.api import verify
from bole_runtime.backends import get_backend
from bole_runtime.calls import CommitCall, CommitLayer
from bole_runtime.conv import ConvFactors, prepare_conv_commit, tree_conv
from bole_runtime.factors import Factors
from bole_runtime.state.buffers import RoundBuffers
from bole_runtime.state.config import StateConfig, state_config
from bole_runtime.state.copy_slots import copy_slots
from bole_runtime.state.geometry import LayerGeometry
from bole_runtime.tree import TreeBatch


@dataclass(frozen=True)
class EnginePools:
    """State pools of an engine, all recurrent layers of a rank.

    Attributes:
        states: [layers, slots, HV, dv, dk], dk contiguous.
        conv: [layers, slots, C, W - 1] of raw inputs, oldest first, any strides; several such pools where a layer's
            channels are kept apart (q, k and v), in the order of the channels; or None.
    """

    states: torch.Tensor
    conv: torch.Tensor | tuple[torch.Tensor, ...] | None = None

    @property
    def windows(self) -> tuple[torch.Tensor, ...]:
        """The pools of a layer's convolutions; empty without one."""
        if self.conv is None:
            return ()
        return (self.conv,) if isinstance(self.conv, torch.Tensor) else self.conv


class EngineRounds:
    """Verification and commit over pools of an engine.

    Args:
        layer: geometry that all layers share.
        pools: of the engine.
        nodes: of a tree, the same for every request.
        max_depth: largest number of strict ancestors of a node.
        batch: rows that the first buffers have; more rows later take new ones.
        dtype: of q, k and v.
        precision: ``fast`` or ``lossless``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a size or name is wrong.
    """

    def __init__(
        self,
        layer: LayerGeometry,
        pools: EnginePools,
        *,
        nodes: int,
        max_depth: int,
        batch: int,
        dtype: torch.dtype = torch.bfloat16,
        precision: str = "lossless",
    ) -> None:
        channels = sum(pool.shape[2] for pool in pools.windows)
        if channels != layer.channels:
            raise ValueError(f"pools: {channels} channels of convolutions, where the layer has {layer.channels}")
        self.layer, self.pools, self.nodes = layer, pools, nodes
        self.max_depth = min(max_depth, nodes - 1)
        self.precision, self.dtype = precision, dtype
        self._rounds: dict[int, BatchRound] = {}
        self._rows = 0
        self._buffers: RoundBuffers | None = None
        self._hint = max(batch, 1)
        self.bytes = 0

    def config(self, batch: int) -> StateConfig:
        """Return sizes for a batch, checked."""
        layers, slots = self.pools.states.shape[:2]
        return state_config(
            [self.layer] * layers, slots=max(slots, batch), max_batch=batch, max_nodes=self.nodes,
            max_depth=self.max_depth, dtype=self.dtype, state_dtype=self.pools.states.dtype,
            precision=self.precision,
        )  # fmt: skip

    def batch(self, rows: int) -> BatchRound:
        """Return what rounds of a batch size share, made at the first call (which must be outside a capture)."""
        found = self._rounds.get(rows)
        if found is None:
            found = self._rounds[rows] = BatchRound(self, rows, self._buffers_for(rows))
        return found

    @torch.inference_mode(False)  # tensors that live on are no inference tensors
    def _buffers_for(self, rows: int) -> RoundBuffers:
        if self._buffers is None or rows > self._rows:
            # Rounds of fewer rows keep the buffers that their graphs write.
            self._rows = max(rows, self._hint)
            config = self.config(self._rows)
            self._buffers = RoundBuffers(config, self.pools.states.device)
            self.bytes += sum(RoundBuffers.nbytes(config))
        return self._buffers


class BatchRound:
    """Rounds of one batch size. Arguments are as for :func:`bole_runtime.verify` and its companions.

    Attributes:
        tree: topology, dense [rows, nodes].
        factors: of each layer; those of a layer that was verified also hold its parameters.
        inputs: of each layer, one a pool of convolution windows.
    """

    @torch.inference_mode(False)
    def __init__(self, owner: EngineRounds, rows: int, buffers: RoundBuffers) -> None:
        self._owner = owner
        device = owner.pools.states.device
        chain = torch.arange(-1, owner.nodes - 1, dtype=torch.int32, device=device)
        self._chain = chain.expand(rows, owner.nodes)
        self.tree = TreeBatch(rows, owner.nodes, max_depth=owner.max_depth, device=device, validate=False)
        count = owner.pools.states.shape[0]
        self._kept = [buffers.factors(n, owner.layer, owner.dtype, self.tree) for n in range(count)]
        self.factors: list[Factors] = list(self._kept)
        self.inputs = [self._parts(buffers.conv_factors(n, owner.layer, self.tree)) for n in range(count)]
        self._none = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self._verified: set[int] = set()
        self._commits: list[Callable[[torch.Tensor, torch.Tensor], None]] | None = None

    def _parts(self, whole: ConvFactors | None) -> tuple[ConvFactors, ...]:
        """Return a layer's buffer of raw inputs by convolution: columns of it."""
        if whole is None:
            return ()
        sizes = [pool.shape[2] for pool in self._owner.pools.windows]
        return tuple(ConvFactors(x, whole.width, self.tree) for x in whole.x.split(sizes, -1))

    def set_parents(self, parents: torch.Tensor | None) -> None:
        """Take the trees of this round; None for chains. Needs no host sync, so a CUDA graph can hold it."""
        self.tree.update_(self._chain if parents is None else parents)

    def conv(
        self, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slots: torch.Tensor,
        activation: str | None, part: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        """Convolve a layer's raw inputs [rows, nodes, C] along the trees, and keep them.

        ``part`` is the number of the convolution, where a layer has a pool for each of several.
        """
        out, _ = tree_conv(
            x, weight, bias, state=self._owner.pools.windows[part][layer], slots=slots, tree=self.tree,
            activation=activation, factors=self.inputs[layer][part],
        )  # fmt: skip
        return out

    def verify(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        gates: Mapping[str, torch.Tensor | float], slots: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Verify a layer and keep its factors; returns [rows, nodes, HV, dv] in the dtype of v.

        Families whose gates are kept as they are given need the layer's parameters at the commit: tensors of ``gates``
        that are no node's must live on, and hold what they hold now or what replaces it in place.
        """
        owner = self._owner
        out, self.factors[layer] = verify(
            q, k, v, gates=gates, state=owner.pools.states[layer], slots=slots, tree=self.tree,
            recurrence=owner.layer.spec, precision=owner.precision, factors=self._kept[layer],
        )  # fmt: skip
        self._verified.add(layer)
        return out

    def commit(self, slots: torch.Tensor, accepted: torch.Tensor) -> None:
        """Write the accepted states of all layers into the slots.

        Args:
            slots: int32 or int64 [n], n at most the rows; -1 writes nothing.
            accepted: int32 or int64 [n], request-local terminal node; -1 writes nothing.
        """
        if self._commits is None:
            self._commits = self._prepare()
        slots, accepted = self._padded(slots), self._padded(accepted)
        for launch in self._commits:
            launch(slots, accepted)

    def commit_copies(self, slots: torch.Tensor, targets: torch.Tensor, accepted: torch.Tensor) -> None:
        """Write states after some node into other slots, for a prefix cache; call it before :meth:`commit`.

        Args:
            slots: int32 or int64 [n].
            targets: int32 or int64 [n], slots of their own.
            accepted: int32 or int64 [n], node whose state is wanted; -1 for none.
        """
        wanted = accepted >= 0
        targets = torch.where(wanted, targets, torch.full_like(targets, -1))
        copy_slots(self._owner.pools.states, slots, targets)
        for pool in self._owner.pools.windows:
            copy_slots(pool, slots, targets)
        self.commit(targets, accepted)

    def _padded(self, values: torch.Tensor) -> torch.Tensor:
        if values.shape[0] == self._none.shape[0]:
            return values.contiguous()
        padded = self._none.to(values.dtype, copy=True)
        padded[: values.shape[0]] = values
        return padded

    @torch.inference_mode(False)
    def _prepare(self) -> list[Callable[[torch.Tensor, torch.Tensor], None]]:
        owner, tree = self._owner, self.tree
        if len(self._verified) < len(self.factors):
            done = f"{len(self._verified)} of {len(self.factors)}"
            raise RuntimeError(f"commit: {done} layers were verified with {tree.max_batch} rows")
        # Layers of one geometry: one launch.
        layers = tuple(CommitLayer(owner.pools.states[n], f) for n, f in enumerate(self.factors))
        call = CommitCall(owner.layer.spec, layers, self._none, self._none, tree, owner.precision)
        backend = get_backend(tree.device, owner.layer.spec)
        made: list[Callable[[torch.Tensor, torch.Tensor], None]] = []
        if backend.prepare is not None:
            prepared = backend.prepare(call)
            made.append(lambda slots, accepted: prepared(slots, accepted, None))
        else:
            made.append(
                lambda slots, accepted: backend.commit(
                    CommitCall(call.spec, call.layers, slots, accepted, call.tree, call.precision)
                )
            )
        # Convolutions of one geometry, also those of one layer: one launch.
        pairs = [
            (pool[n], part)
            for n, parts in enumerate(self.inputs)
            for pool, part in zip(owner.pools.windows, parts, strict=True)
        ]
        if pairs:
            made.append(prepare_conv_commit([pool for pool, _ in pairs], [part for _, part in pairs]))
        return made
