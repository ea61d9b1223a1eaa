"""Rounds of an engine that keeps the states itself: its pools, its slots, its trees, one capture for each batch size.

A CUDA graph of the engine holds the forward, whose Python runs once; the commit runs outside it, every round. So what a
round needs is kept by batch size: the tree, and views of factor buffers that all batch sizes share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from bole_runtime.api import verify
from bole_runtime.backends import get_backend
from bole_runtime.calls import CommitCall, CommitLayer
from bole_runtime.conv import ConvFactors, prepare_conv_commit, tree_conv
from bole_runtime.factors import Factors
from bole_runtime.integrations.engine_forward import ForwardLog
from bole_runtime.integrations.engine_memory import RoundMemory
from bole_runtime.integrations.engine_pools import EnginePools, check_commit, check_targets
from bole_runtime.state.buffers import RoundBuffers
from bole_runtime.state.config import StateConfig, state_config
from bole_runtime.state.copy_slots import copy_slots
from bole_runtime.state.geometry import LayerGeometry
from bole_runtime.tree import MAX_NODES, TreeBatch
from bole_runtime.tree.check import check_capacity
from bole_runtime.validate import check_index, not_a

__all__ = ["BatchRound", "EnginePools", "EngineRounds", "RoundMemory"]


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
        memory: factor buffers shared with rounds of other numbers of nodes over the same layers; only one of them may
            have a forward that is not committed.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a size or name is wrong, or the pools do not fit the layer, or the memory is of other layers.
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
        memory: RoundMemory | None = None,
    ) -> None:
        if not isinstance(layer, LayerGeometry):
            not_a("layer", layer, "a LayerGeometry")
        if not isinstance(pools, EnginePools):
            not_a("pools", pools, "an EnginePools")
        pools.check(layer)
        check_capacity("nodes", nodes, 1, MAX_NODES)
        check_capacity("max_depth", max_depth, 0, 2**31 - 1)
        self.layer, self.pools, self.nodes = layer, pools, nodes
        self.max_depth = min(max_depth, nodes - 1)
        self.precision, self.dtype = precision, dtype
        if memory is not None and not isinstance(memory, RoundMemory):
            not_a("memory", memory, "a RoundMemory or None")
        self.memory = RoundMemory() if memory is None else memory
        self._rounds: dict[int, BatchRound] = {}
        self._hint = max(batch, 1)
        # Which also checks the sizes and names that are left.
        self.memory.check(self.config(self._hint), pools.states.device)

    @property
    def bytes(self) -> int:
        """Bytes of the factor buffers, those of rounds that share them included."""
        return self.memory.bytes

    def config(self, batch: int) -> StateConfig:
        """Return sizes for a batch, checked."""
        layers, slots = self.pools.states.shape[:2]
        return state_config(
            [self.layer] * layers, slots=max(slots, batch), max_batch=batch, max_nodes=self.nodes,
            max_depth=self.max_depth, dtype=self.dtype, state_dtype=self.pools.states.dtype,
            precision=self.precision,
        )  # fmt: skip

    def batch(self, rows: int) -> BatchRound:
        """Return what rounds of a batch size share, made at the first call (which must be outside a capture).

        Raises:
            TypeError: ``rows`` is no int.
            ValueError: there are none, or too many.
        """
        check_capacity("rows", rows, 1, 2**31 - 2)
        found = self._rounds.get(rows)
        if found is None:
            found = self._rounds[rows] = BatchRound(self, rows, self._buffers_for(rows))
        return found

    def _buffers_for(self, rows: int) -> RoundBuffers:
        # Rounds of fewer rows keep the buffers that their graphs write.
        return self.memory.take(
            rows * self.nodes, lambda: self.config(max(rows, self._hint)), self.pools.states.device
        )  # fmt: skip


class BatchRound:
    """Rounds of one batch size. Arguments are as for :func:`bole_runtime.verify` and its companions.

    A round is :meth:`set_parents`, :meth:`conv` and :meth:`verify` of every layer, :meth:`commit`. What a forward keeps
    lies in buffers that the next one overwrites, those of other batch sizes too, so it is committed before that.

    A commit is refused after half a forward: where Python went through some of the layers or convolutions since
    ``set_parents`` (or the last commit), but not all. A graph's replay runs no Python, so a commit with no layer seen
    since is taken for one after a replay, once there was a whole forward. That cannot be checked: a commit without any
    forward, twice for one, or after that of another batch size writes what the buffers hold.

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
        self._log = ForwardLog(count, len(owner.pools.windows))
        self._commits: list[Callable[[torch.Tensor, torch.Tensor], None]] | None = None

    def _parts(self, whole: ConvFactors | None) -> tuple[ConvFactors, ...]:
        """Return a layer's buffer of raw inputs by convolution: columns of it."""
        if whole is None:
            return ()
        sizes = [pool.shape[2] for pool in self._owner.pools.windows]
        return tuple(ConvFactors(x, whole.width, self.tree) for x in whole.x.split(sizes, -1))

    def set_parents(self, parents: torch.Tensor | None) -> None:
        """Take the trees of this round; None for chains. Needs no host sync, so a CUDA graph can hold it.

        It begins a forward: layers verified before it no longer count.
        """
        self._log.clear()
        self.tree.update_(self._chain if parents is None else parents)

    def conv(
        self, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slots: torch.Tensor,
        activation: str | None, part: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        """Convolve a layer's raw inputs [rows, nodes, C] along the trees, and keep them.

        ``part`` is the number of the convolution, where a layer has a pool for each of several.
        """
        self._check_layer(layer)
        check_capacity("part", part, 0, len(self._owner.pools.windows) - 1)
        out, _ = tree_conv(
            x, weight, bias, state=self._owner.pools.windows[part][layer], slots=slots, tree=self.tree,
            activation=activation, factors=self.inputs[layer][part],
        )  # fmt: skip
        self._log.convolved(layer, part)
        return out

    def verify(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        gates: Mapping[str, torch.Tensor | float], slots: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Verify a layer and keep its factors; returns [rows, nodes, HV, dv] in the dtype of v.

        Families whose gates are kept as they are given need the layer's parameters at the commit: tensors of ``gates``
        that are no node's must live on, and hold what they hold now or what replaces it in place.
        """
        self._check_layer(layer)
        owner = self._owner
        out, self.factors[layer] = verify(
            q, k, v, gates=gates, state=owner.pools.states[layer], slots=slots, tree=self.tree,
            recurrence=owner.layer.spec, precision=owner.precision, factors=self._kept[layer],
        )  # fmt: skip
        self._log.verified(layer)
        return out

    def commit(self, slots: torch.Tensor, accepted: torch.Tensor) -> None:
        """Write the accepted states of all layers into the slots.

        Args:
            slots: int32 or int64 [n], n at most the rows; -1 writes nothing.
            accepted: int32 or int64 [n], request-local terminal node; -1 writes nothing.

        Raises:
            TypeError: indices that are no integer tensors.
            ValueError: wrong shapes or devices; on a CPU also values that are out of range, or a slot given twice.
            RuntimeError: after half a forward. Nothing has been written, whatever the error.
        """
        n = _length(slots)
        slots, accepted = self._rows("slots", slots, n), self._rows("accepted", accepted, n)
        commits = self._ready()
        check_commit(self.tree, slots, accepted, self._owner.pools.states.shape[1])
        for launch in commits:
            launch(slots, accepted)
        self._log.clear()

    def commit_copies(self, slots: torch.Tensor, targets: torch.Tensor, accepted: torch.Tensor) -> None:
        """Write states after some node into other slots, for a prefix cache; call it before :meth:`commit`.

        Args:
            slots: int32 or int64 [n]; -1 copies nothing.
            targets: int32 or int64 [n], slots of their own.
            accepted: int32 or int64 [n], node whose state is wanted; -1 for none.

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`commit`; on a CPU also targets that are no slots of their
                own. Nothing has been written.
        """
        pools, n = self._owner.pools, _length(slots)
        count = pools.states.shape[1]
        slots, targets, accepted = (
            self._rows(name, t, n) for name, t in (("slots", slots), ("targets", targets), ("accepted", accepted))
        )
        # A target without a source would get the path's updates on top of a state that is not the request's.
        wanted = (accepted >= 0) & (slots >= 0) & (slots < count)
        targets = torch.where(wanted, targets, torch.full_like(targets, -1))
        commits = self._ready()
        check_commit(self.tree, slots, accepted, count)
        check_targets(slots, targets, wanted, count)
        for pool in (pools.states, *pools.windows):
            copy_slots(pool, slots, targets)
        for launch in commits:
            launch(targets, accepted)

    def abandon(self) -> None:
        """Forget a forward that stopped, so that a commit after a graph's replay is not taken for one of it."""
        self._log.clear()

    def _check_layer(self, layer: int) -> None:
        check_capacity("layer", layer, 0, len(self._kept) - 1)

    def _rows(self, name: str, given: torch.Tensor, n: int) -> torch.Tensor:
        """Return n indices, checked, as many as the batch has rows; the last ones name nothing."""
        rows = self._none.shape[0]
        given = check_index(name, given, self.tree.device, n)
        if n > rows:
            raise ValueError(f"{name}: {n} entries for a batch of {rows} rows")
        if n == rows:
            return given
        padded = self._none.to(given.dtype, copy=True)
        padded[:n] = given
        return padded

    def _ready(self) -> list[Callable[[torch.Tensor, torch.Tensor], None]]:
        """Return what commits, after a forward that may be committed."""
        self._log.check(self._none.shape[0])
        if self._commits is None:
            self._commits = self._prepare()
        return self._commits

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
        # Convolutions of one geometry, also those of one layer: one launch.
        pairs = [
            (pool[n], part)
            for n, parts in enumerate(self.inputs)
            for pool, part in zip(owner.pools.windows, parts, strict=True)
        ]
        if pairs:
            made.append(prepare_conv_commit([pool for pool, _ in pairs], [part for _, part in pairs]))
        return made


def _length(indices: object) -> int:
    return indices.shape[0] if isinstance(indices, torch.Tensor) and indices.dim() else 0
