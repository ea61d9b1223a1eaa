"""Inputs of one bucket at full size: as many layers as keep the states cold in L2, or as memory allows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bole_codegen.measure import (
    LayerInputs,
    VerifyInputs,
    Workload,
    commit_traffic,
    input_bytes_per_layer,
    layers_for_cold_l2,
    make_layer_inputs,
    make_parents,
    relative_error,
    tree_depth,
    verify_traffic,
)
from bole_codegen.search.case import bound
from bole_codegen.search.operands import Operands, make_pending, on_torch
from bole_codegen.search.results import CandidateError
from bole_codegen.search.targets import Target
from bole_runtime import Config, Factors, PendingChain, TreeBatch, commit, get_family
from bole_runtime.kernels.problem import Problem

#: Layers of one commit launch, as a model of about this many recurrent layers has.
COMMIT_LAYERS = 24
#: Slots of a pool that no request uses, so that a wrong slot is a wrong answer.
EXTRA_SLOTS = 2


def recurrence(target: Target) -> Problem:
    """Return the problem of a target that is of a verify or a recurrent commit."""
    assert isinstance(target.problem, Problem)
    return target.problem


def workload(target: Target) -> Workload:
    """Return the sizes of a target's launch, without its pending chain."""
    p = recurrence(target)
    return Workload(
        batch=target.batch,
        nodes=p.nodes,
        hk=target.hk,
        hv=target.hv,
        dk=p.dk,
        dv=p.dv,
        in_dtype=p.in_dtype,
        state_dtype=p.state_dtype,
        out_dtype=p.in_dtype,
        gate_mode=p.gate_mode,
        family=p.family,
    )


@dataclass
class BucketInputs:
    """Tensors of every layer of one bucket.

    Attributes:
        target: the bucket.
        inputs: operands of each layer.
        tree: topology, shared by the layers.
        pending: full pending chain, shared by the layers, or None.
        outs: output of each layer (verify).
        accepted: terminal node of each request (commit).
        factors: of each layer: what a verify captures, as a server has it do, and what a commit reads.
    """

    target: Target
    inputs: VerifyInputs
    tree: TreeBatch
    pending: PendingChain | None
    outs: list[Tensor]
    accepted: Tensor
    factors: list[Factors]
    _want: dict[str, Tensor] = field(default_factory=dict)

    def operands(self, layer: int) -> Operands:
        """Return the arguments of one layer's call."""
        part = self.inputs.layers[layer]
        gates: dict[str, Any] = dict(part.gates(recurrence(self.target).gate_mode))
        return Operands(part.q, part.k, part.v, gates, part.state, self.inputs.slots, self.tree, self.pending)

    def serving(self, target: Target) -> BucketInputs:
        """Return the same tensors for a target of another precision profile."""
        return replace(self, target=target)

    def launches(self, config: Config) -> tuple[Callable[[int], Callable[[], object]], int, int]:
        """Return what makes a graph node, how many nodes there are, and how many layers each holds."""
        problem = recurrence(self.target)
        if problem.op == "verify":

            def make_verify(layer: int) -> Callable[[], object]:
                operands, out, factors = self.operands(layer), self.outs[layer], self.factors[layer]
                return lambda: operands.verify(problem, out, config, factors)

            return make_verify, len(self.inputs.layers), 1
        count = len(self.inputs.layers)
        each = min(COMMIT_LAYERS, count)

        def make_commit(group: int) -> Callable[[], object]:
            part = range(group * each, (group + 1) * each)
            pools = [self.inputs.layers[i].state for i in part]
            factors = [self.factors[i] for i in part]
            slots, accepted = self.inputs.slots, self.accepted
            return lambda: commit(
                pools, slots, factors, accepted, precision=problem.precision, variant=config, validate=False
            )

        return make_commit, count // each, each

    def floor_bytes(self) -> int:
        """Return the fewest bytes of a layer: state, inputs and outputs once."""
        work = replace(workload(self.target), pending=self.target.problem.pending)
        if self.target.problem.op == "verify":
            return verify_traffic(work, captured=True).total
        depths = self.tree.depths.reshape(self.target.batch, -1).cpu()
        lengths = [int(depths[b, a]) + 1 for b, a in enumerate(self.accepted.tolist())]
        return commit_traffic(work, lengths).total

    def spot_check(self, config: Config) -> float:
        """Check the first, middle and last request of the full-size launch against the fp64 reference.

        Raises:
            CandidateError: they differ.
        """
        target, problem = self.target, recurrence(self.target)
        device = self.inputs.slots.device
        rows = sorted({0, target.batch // 2, target.batch - 1})
        index = torch.tensor(rows, device=device)
        ops = self.operands(0)
        used = ops.slots[index].long()
        if problem.op == "verify":
            if "out" not in self._want:
                part = self._part(ops, rows, used)
                self._want["out"] = on_torch(lambda: part.verify(problem, None, None))[0]
            out = torch.full(ops.v.shape, float("nan"), dtype=torch.float32, device=device)
            ops.verify(problem, out, config)
            return _compare(problem, out[index], self._want["out"])
        # A timing has moved the states on: the reference starts from what they are now.
        small = self._part(ops, rows, used)
        accepted = self.accepted[index]

        def fold() -> None:
            _, factors = small.verify(problem, None, None)
            commit(small.state, small.slots, factors, accepted, precision=problem.precision, validate=False)

        on_torch(fold)
        saved = ops.state[used]
        commit(
            ops.state,
            ops.slots,
            self.factors[0],
            self.accepted,
            precision=problem.precision,
            variant=config,
            validate=False,
        )
        got = ops.state[used]
        ops.state[used] = saved
        return _compare(problem, got, small.state)

    def _part(self, ops: Operands, rows: list[int], used: Tensor) -> Operands:
        """Return the operands of some requests in fp64."""
        index = torch.tensor(rows, device=used.device)
        problem = recurrence(self.target)
        per_node = {i.name for i in get_family(problem.family).node_gates(problem.gate_mode)}
        # The pool may be large: only the slots that are read are widened.
        return Operands(
            ops.q[index],
            ops.k[index],
            ops.v[index],
            {n: g[index] if n in per_node else g for n, g in ops.gates.items()},
            ops.state[used],
            torch.arange(len(rows), dtype=torch.int32, device=used.device),
            TreeBatch.from_parents(self.inputs.parents[index], validate=False),
            None if self.pending is None else _take(self.pending, used),
        ).double()


def _compare(problem: Problem, got: Tensor, want: Tensor) -> float:
    error = relative_error(got, want)
    if not error <= bound(problem):
        raise CandidateError("wrong", f"relative error {error:.3g} at full size is above {bound(problem):.3g}")
    return error


def _take(pending: PendingChain, slots: Tensor) -> PendingChain:
    return PendingChain(
        pending.k[slots],
        pending.v[slots],
        {n: g[slots] for n, g in pending.gates.items()},
        pending.length[slots],
        pending.start[slots],
    )


def layer_count(target: Target, l2_bytes: int, memory: int) -> int:
    """Return how many layers a bucket gets; for a commit a multiple of the layers of a launch.

    Raises:
        CandidateError: not even one layer fits.
    """
    work = workload(target)
    need = input_bytes_per_layer(work)
    if need > memory:
        raise CandidateError("error", f"one layer of this bucket needs {need >> 20} MiB, {memory >> 20} are free")
    layers = layers_for_cold_l2(work.state_bytes, l2_bytes, memory_cap=memory, bytes_per_layer=need)
    if target.problem.op == "verify":
        return layers
    fits = memory // need
    each = min(COMMIT_LAYERS, fits)
    return min(-(-layers // each), fits // each) * each


@functools.lru_cache(maxsize=64)
def cached_parents(shape: str, batch: int, nodes: int, seed: int) -> NDArray[np.int32]:
    """Random trees of a large batch take a second to draw; many buckets share them."""
    return make_parents(shape, batch, nodes, seed)


def _draw(target: Target, layers: int, seed: int, device: torch.device | str) -> VerifyInputs:
    work = workload(target)
    parents = cached_parents(target.shape, target.batch, work.nodes, seed)
    generator = torch.Generator(device=device).manual_seed(seed)
    pool = target.batch + EXTRA_SLOTS
    slots = np.random.default_rng(seed + 1).permutation(pool)[: target.batch].astype(np.int32)
    return VerifyInputs(
        layers=tuple(make_layer_inputs(work, pool, generator, device) for _ in range(layers)),
        parents=torch.from_numpy(parents.copy()).to(device),
        slots=torch.from_numpy(slots).to(device),
        depth=tree_depth(parents),
        workload=work,
    )


def open_bucket(target: Target, layers: int, seed: int, device: torch.device | str) -> BucketInputs:
    """Draw the inputs of a bucket."""
    problem = recurrence(target)
    inputs = _draw(target, layers, seed, device)
    tree = TreeBatch.from_parents(inputs.parents, validate=False)
    first = inputs.layers[0]
    pending = None
    if problem.pending:
        pending = make_pending(problem, target.hk, target.hv, first.state.shape[0], first.q, seed + 1, full=True)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    accepted = torch.randint(0, problem.nodes, (target.batch,), generator=generator, dtype=torch.int32).to(device)
    verify = problem.op == "verify"
    outs = [torch.empty_like(part.v) for part in inputs.layers] if verify else []
    made = BucketInputs(target, inputs, tree, pending, outs, accepted, [])
    for i, part in enumerate(inputs.layers):
        made.factors.append(made.operands(i).buffers(problem) if verify else _as_given(target, part, tree, pending))
    return made


def _as_given(target: Target, part: LayerInputs, tree: TreeBatch, pending: PendingChain | None) -> Factors:
    problem = recurrence(target)
    spec = get_family(problem.family)
    return Factors(
        spec=spec,
        gate_mode=problem.gate_mode,
        k=part.k,
        v=part.v,
        gates=dict(part.gates(problem.gate_mode)),
        beta_scale=1.0,
        qk_l2norm=spec.qk_l2norm,
        tree=tree,
        pending=pending,
        options={i.name: i.default or 0.0 for i in spec.options(problem.gate_mode) if i.name != "beta_scale"},
    )
