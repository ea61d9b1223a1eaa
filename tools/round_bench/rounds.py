"""Rounds that can be captured: Bole's under a commit policy, and SGLang's serial kernel with its state scatter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from verify_bench import oracle

from bole_codegen.measure import VerifyInputs, Workload, commit_traffic, make_verify_inputs, verify_traffic
from bole_runtime import LayerGeometry, StateManager, TreeBatch
from bole_runtime.kernels.problem import Problem
from bole_runtime.sampling import Acceptance, accept_predicted

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: A token that no node holds: the walk stops where the target predicts it.
NO_TOKEN = 1 << 20


@dataclass(frozen=True)
class RoundPoint:
    """One point: a model's recurrent layers at a batch and a number of nodes."""

    geometry: LayerGeometry
    layers: int
    batch: int
    nodes: int
    shape: str = "ragged"
    accepted: int = 4
    in_dtype: str = "bf16"
    state_dtype: str = "fp32"
    precision: str = "lossless"

    def inputs(self, seed: int, device: str) -> VerifyInputs:
        """Draw the inputs of every layer."""
        g = self.geometry
        problem = Problem(
            "verify", "gdn", g.dk, g.dv, g.value_heads // g.key_heads, self.in_dtype, self.state_dtype, "raw",
            self.precision, 16, 8, 0, 1,
        )  # fmt: skip
        return make_verify_inputs(
            problem, g.key_heads, g.value_heads, self.batch, self.nodes, self.shape, self.layers, seed, device
        )


class Acceptor:
    """Greedy acceptance of a path of a given length in every tree: one launch, as in an engine that has its argmax."""

    def __init__(self, inputs: VerifyInputs, tree: TreeBatch, accepted: int) -> None:
        self.terminal = oracle.accepted_nodes(inputs, accepted).to(torch.int32)
        batch, nodes = inputs.parents.shape
        parents, ends = inputs.parents.tolist(), self.terminal.tolist()
        predicted = torch.full((batch, nodes), NO_TOKEN, dtype=torch.int64)
        self.counts = []
        for b in range(batch):
            node, count = ends[b], 1
            while parents[b][node] >= 0:
                predicted[b, parents[b][node]] = node
                node, count = parents[b][node], count + 1
            self.counts.append(count)
        self._predicted = predicted.to(tree.device)
        self._tokens = torch.arange(nodes, device=tree.device).expand(batch, nodes).contiguous()
        self._tree, self.out = tree, Acceptance.empty(tree)

    def __call__(self) -> torch.Tensor:
        """Walk the trees; return the accepted nodes."""
        return accept_predicted(self._predicted, self._tokens, self._tree, out=self.out).accepted


class BoleRound:
    """Rebuild the trees, verify every layer, accept, commit."""

    def __init__(self, point: RoundPoint, inputs: VerifyInputs, policy: str, pending: int | None) -> None:
        self.name = policy
        self.point, self.inputs = point, inputs
        device, slots = inputs.parents.device, inputs.layers[0].state.shape[0]
        sizes: dict[str, Any] = {} if policy == "eager" else {"pending": pending}
        self.manager = StateManager(
            [point.geometry] * point.layers, slots=slots, max_batch=point.batch, max_nodes=point.nodes,
            max_depth=inputs.depth, policy=policy, dtype=DTYPES[point.in_dtype],
            state_dtype=DTYPES[point.state_dtype], precision=point.precision, device=device, **sizes,
        )  # fmt: skip
        for _ in range(slots):
            self.manager.allocate()
        for pool, layer in zip(self.manager.request.pools, inputs.layers, strict=True):
            pool.copy_(layer.state)
        self.tree = TreeBatch.from_parents(inputs.parents, max_depth=inputs.depth, validate=False)
        self.round = self.manager.round(self.tree, inputs.slots)
        self.accept = Acceptor(inputs, self.tree, point.accepted)
        self.outs = [torch.empty_like(layer.v) for layer in inputs.layers]

    def run(self) -> None:
        """The calls of a round; a CUDA graph can hold them."""
        self.tree.update_(self.inputs.parents)
        for n, layer in enumerate(self.inputs.layers):
            self.round.verify(n, layer.q, layer.k, layer.v, gates=layer.raw, out=self.outs[n], validate=False)
        self.round.commit(self.accept(), validate=False)

    @property
    def cycle(self) -> int:
        """Rounds after which the longest path's chain is as long as before."""
        config = self.manager.config
        if config.policy != "deferred":
            return 1
        return config.flush_at // max(1, max(self.accept.counts)) + 1

    @property
    def workspace_bytes(self) -> int:
        """Bytes beyond the states: factors, chains, scratch."""
        memory = self.manager.memory
        return memory.round + memory.chains + memory.scratch

    def bytes(self) -> float:
        """Bytes that a round must move, in the mean over a cycle."""
        return round_bytes(self.inputs.workload, self.point.layers, self.name, self.accept.counts, self.cycle)


def round_bytes(work: Workload, layers: int, policy: str, counts: list[int], cycle: int) -> float:
    """Return the bytes that a round must move at least, in the mean over ``cycle`` rounds.

    ``eager`` reads a state twice and writes it once. ``fused`` writes it once and reads it twice, the second time from
    cache at best, and moves the accepted factors into the ring and out again. ``deferred`` reads it once, and once in a
    cycle twice; every round reads a chain of half a cycle's tokens.
    """
    each = verify_traffic(work, captured=True).total
    accepted = sum(counts)
    factors = work.factor_bytes_per_node
    commit = commit_traffic(work, counts, captured=True).total
    if policy == "eager":
        return layers * float(each + commit)
    if policy == "fused":
        return layers * float(each + commit + 2 * accepted * factors)
    chain = accepted * factors * (cycle - 1) / 2
    flush = (commit + accepted * factors * (cycle - 1)) / cycle
    append = 2 * accepted * factors * (cycle - 1) / cycle
    return layers * (each + chain + flush + append)


class SerialRound:
    """SGLang's round: its serial kernel snapshots every node's state, its scatter copies the accepted ones."""

    name = "sglang"
    cycle = 1

    def __init__(
        self, point: RoundPoint, inputs: VerifyInputs, entry: Callable[..., torch.Tensor], scatter: Callable[..., None]
    ) -> None:
        from peers.sglang_serial import PreparedSerial

        # The kernel reads the pools that the scatter writes: those of all layers in one tensor, as SGLang has them.
        self._pools = torch.stack([layer.state for layer in inputs.layers])
        layers = (replace(layer, state=pool) for layer, pool in zip(inputs.layers, self._pools, strict=True))
        inputs = replace(inputs, layers=tuple(layers))
        self.point, self.inputs, self._scatter = point, inputs, scatter
        chain = point.shape == "chain"
        # Every layer's snapshots must live until the scatter: one buffer a layer, in one tensor.
        self._peer = PreparedSerial(entry, inputs, chain, False, 1)
        batch, work = point.batch, inputs.workload
        shape = (point.layers, batch + 1, point.nodes, work.hv, work.dv, work.dk)
        state = inputs.layers[0].state
        self._snapshots = torch.empty(shape, dtype=state.dtype, device=state.device)
        self._peer.snapshots.buffers = list(self._snapshots)
        self._slots = inputs.slots.to(torch.int32)
        tree = TreeBatch.from_parents(inputs.parents, max_depth=inputs.depth, validate=False)
        self.accept = Acceptor(inputs, tree, point.accepted)
        self._layers = [self._peer.make_layer(n) for n in range(point.layers)]

    def run(self) -> None:
        """The calls of a round."""
        for layer in self._layers:
            layer()
        self._scatter(self._pools, self._snapshots, self._slots, self.accept())

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the snapshots."""
        return self._snapshots.numel() * self._snapshots.element_size()

    def bytes(self) -> float:
        """Bytes that the round moves: every node's state is written, and all but the leaves' read again."""
        return serial_bytes(self.inputs.workload, self.point.layers, len(self.accept.counts))

    @staticmethod
    def memory_bytes(work: Workload, layers: int) -> int:
        """Bytes of the snapshots of all layers, and of the stacked pools."""
        return layers * (work.snapshot_bytes // work.batch * (work.batch + 1) + work.state_bytes)


def serial_bytes(work: Workload, layers: int, live: int) -> float:
    """Return the least that a serial round moves: a snapshot a node written, accepted ones read and written."""
    each = verify_traffic(work).total + work.snapshot_bytes
    return layers * float(each + 2 * work.state_bytes // max(1, work.batch) * live)
