"""Rounds of an engine that keeps the states itself: its pools, its slots, its trees, one capture for each batch size.

A CUDA graph of the engine holds the forward, whose Python runs once; the commit runs outside it, every round. So what a
round needs is kept by batch size: the tree, and views of factor buffers that all batch sizes share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        conv: [layers, slots, C, W - 1] of raw inputs, oldest first, or None.
    """

    states: torch.Tensor
    conv: torch.Tensor | None = None


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
    """

    @torch.inference_mode(False)
    def __init__(self, owner: EngineRounds, rows: int, buffers: RoundBuffers) -> None:
        self._owner = owner
        device = owner.pools.states.device
        chain = torch.arange(-1, owner.nodes - 1, dtype=torch.int32, device=device)
        self._chain = chain.expand(rows, owner.nodes)
        self.tree = TreeBatch(rows, owner.nodes, max_depth=owner.max_depth, device=device, validate=False)
        count = owner.pools.states.shape[0]
        self.factors: list[Factors] = [buffers.factors(n, owner.layer, owner.dtype, self.tree) for n in range(count)]
        inputs = [buffers.conv_factors(n, owner.layer, self.tree) for n in range(count)]
        self.inputs: list[ConvFactors] = [f for f in inputs if f is not None]
        self._none = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self._commits: list[Callable[[torch.Tensor, torch.Tensor], None]] | None = None

    def set_parents(self, parents: torch.Tensor | None) -> None:
        """Take the trees of this round; None for chains. Needs no host sync, so a CUDA graph can hold it."""
        self.tree.update_(self._chain if parents is None else parents)

    def conv(
        self, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slots: torch.Tensor,
        activation: str | None,
    ) -> torch.Tensor:  # fmt: skip
        """Convolve a layer's raw inputs [rows, nodes, C] along the trees, and keep them."""
        assert self._owner.pools.conv is not None
        out, _ = tree_conv(
            x, weight, bias, state=self._owner.pools.conv[layer], slots=slots, tree=self.tree,
            activation=activation, factors=self.inputs[layer],
        )  # fmt: skip
        return out

    def verify(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        gates: Mapping[str, torch.Tensor | float], slots: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Verify a layer and keep its factors; returns [rows, nodes, HV, dv] in the dtype of v."""
        owner = self._owner
        out, _ = verify(
            q, k, v, gates=gates, state=owner.pools.states[layer], slots=slots, tree=self.tree,
            recurrence=owner.layer.spec, precision=owner.precision, factors=self.factors[layer],
        )  # fmt: skip
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
        if self._owner.pools.conv is not None:
            copy_slots(self._owner.pools.conv, slots, targets)
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
        if owner.pools.conv is not None:
            pools: Sequence[torch.Tensor] = [owner.pools.conv[n] for n in range(len(self.inputs))]
            made.append(prepare_conv_commit(pools, self.inputs))
        return made
