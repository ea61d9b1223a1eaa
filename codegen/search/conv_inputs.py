"""Inputs of one bucket of a convolution at full size, as ``bucket_inputs.py`` has those of a recurrence.

States of a convolution are small, so as many layers are drawn as keep everything that a layer touches cold in L2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from bole_codegen.measure import layers_for_cold_l2, poison_, relative_error
from bole_codegen.search.bucket_inputs import COMMIT_LAYERS, EXTRA_SLOTS, cached_parents
from bole_codegen.search.case import bits
from bole_codegen.search.conv_case import bound
from bole_codegen.search.conv_operands import ConvOperands, draw_conv, draw_ring
from bole_codegen.search.conv_roofline import commit_bytes, conv_problem, conv_traffic, element_size
from bole_codegen.search.results import CandidateError
from bole_codegen.search.targets import Target
from bole_runtime import Config, ConvFactors, ConvPending, TreeBatch, conv_commit
from bole_runtime.conv import prepare_conv_commit
from bole_runtime.kernels.conv_problem import ConvProblem


@dataclass
class ConvInputs:
    """Tensors of every layer of one bucket.

    Attributes:
        target: the bucket.
        layers: operands of each layer.
        outs: output of each layer; none of a commit.
        buffers: what each layer copies its inputs to, as a server has it do; none of a commit.
        accepted: terminal node of each request (commit).
    """

    target: Target
    layers: list[ConvOperands]
    outs: list[Tensor]
    buffers: list[ConvFactors]
    accepted: Tensor

    def serving(self, target: Target) -> ConvInputs:
        """Return the same tensors for an equal target."""
        return replace(self, target=target)

    def launches(self, config: Config) -> tuple[Callable[[int], Callable[[], object]], int, int]:
        """Return what makes a graph node, how many nodes there are, and how many layers each holds."""
        problem = conv_problem(self.target)
        if problem.op == "tree_conv":

            def make_conv(layer: int) -> Callable[[], object]:
                operands, out, buffer = self.layers[layer], self.outs[layer], self.buffers[layer]
                return lambda: operands.conv(problem, out, config, buffer)

            return make_conv, len(self.layers), 1
        count = len(self.layers)
        each = min(COMMIT_LAYERS, count)

        def make_commit(group: int) -> Callable[[], object]:
            part = self.layers[group * each : (group + 1) * each]
            slots, accepted = part[0].slots, self.accepted
            commit = prepare_conv_commit([p.state for p in part], [p.factors(problem) for p in part], variant=config)
            return lambda: commit(slots, accepted)

        return make_commit, count // each, each

    def floor_bytes(self) -> int:
        """Return the fewest bytes of a layer: state, inputs and outputs once."""
        if conv_problem(self.target).op == "tree_conv":
            return conv_traffic(self.target).total
        depths = self.layers[0].tree.depths.reshape(self.target.batch, -1).cpu()
        lengths = [int(depths[b, a]) + 1 for b, a in enumerate(self.accepted.tolist())]
        return sum(commit_bytes(self.target, lengths))

    def spot_check(self, config: Config) -> float:
        """Check the first, middle and last request of the full-size launch against the exact result.

        Raises:
            CandidateError: they differ.
        """
        problem, ops, batch = conv_problem(self.target), self.layers[0], self.target.batch
        rows = torch.tensor(sorted({0, batch // 2, batch - 1}), device=ops.slots.device)
        used = ops.slots[rows].long()
        part = _part(ops, problem, rows, used)
        if problem.op == "tree_conv":
            # The launch that is timed: one with an fp32 output would have to be compiled for it.
            out, limit = poison_(self.outs[0]), bound(ops.x.dtype)
            ops.conv(problem, out, config, self.buffers[0])
            error = relative_error(out[rows], part.exact(problem))
            if not error <= limit:
                raise CandidateError("wrong", f"relative error {error:.3g} at full size is above {limit:.3g}")
            return error
        want = part.committed(problem, self.accepted[rows])
        saved = ops.state[used]
        conv_commit(ops.state, ops.slots, ops.factors(problem), self.accepted, variant=config, validate=False)
        got = ops.state[used]
        ops.state[used] = saved
        if not bool((bits(got) == bits(want)).all()):
            raise CandidateError("wrong", "the state at full size is not the last inputs of state and path")
        return 0.0


def _part(ops: ConvOperands, problem: ConvProblem, rows: Tensor, used: Tensor) -> ConvOperands:
    """Return the operands of some requests."""
    pending = ops.pending
    if pending is not None:
        pending = ConvPending(pending.x[used], pending.length[used], pending.start[used])
    return ConvOperands(
        ops.x[rows],
        ops.weight[rows] if problem.dynamic else ops.weight,
        ops.bias,
        ops.state[used],
        torch.arange(len(rows), dtype=torch.int32, device=used.device),
        TreeBatch.from_parents(ops.tree.parents[rows], validate=False),
        pending,
    )


def _need(target: Target) -> int:
    """Return the bytes of one layer with all of its tensors."""
    problem, size = conv_problem(target), element_size(target)
    rows = target.batch * problem.nodes * target.hv
    state = (target.batch + EXTRA_SLOTS) * target.hv * problem.length * element_size(target, state=True)
    if problem.op == "conv_commit":
        return rows * size + state
    # Inputs, outputs and their copy; random numbers are drawn in fp32, which is given back.
    return (
        rows * size * (3 + (problem.width if problem.dynamic else 0)) + state + target.hv * (problem.width + 1) * size
    )


def conv_layer_count(target: Target, l2_bytes: int, memory: int) -> int:
    """Return how many layers a bucket gets; for a commit a multiple of the layers of a launch.

    Raises:
        CandidateError: not even one layer fits.
    """
    need = _need(target)
    if need > memory:
        raise CandidateError("error", f"one layer of this bucket needs {need >> 20} MiB, {memory >> 20} are free")
    layers = layers_for_cold_l2(conv_traffic(target).total, l2_bytes, memory_cap=memory, bytes_per_layer=need)
    if target.problem.op == "tree_conv":
        return layers
    fits = memory // need
    each = min(COMMIT_LAYERS, fits)
    return min(-(-layers // each), fits // each) * each


def open_conv(target: Target, layers: int, seed: int, device: torch.device | str) -> ConvInputs:
    """Draw the inputs of a bucket."""
    problem, channels, pool = conv_problem(target), target.hv, target.batch + EXTRA_SLOTS
    parents = torch.from_numpy(cached_parents(target.shape, target.batch, problem.nodes, seed).copy()).to(device)
    tree = TreeBatch.from_parents(parents, validate=False)
    order = np.random.default_rng(seed + 1).permutation(pool)[: target.batch].astype(np.int32)
    slots = torch.from_numpy(order).to(device)
    generator = torch.Generator(device=device).manual_seed(seed)
    ring = draw_ring(problem, channels, pool, device, seed + 1, full=True)
    made = [draw_conv(problem, channels, pool, tree, slots, ring, generator) for _ in range(layers)]
    pick = torch.Generator(device="cpu").manual_seed(seed)
    accepted = torch.randint(0, problem.nodes, (target.batch,), generator=pick, dtype=torch.int32).to(device)
    conv = problem.op == "tree_conv"
    outs = [torch.empty_like(part.x) for part in made] if conv else []
    buffers = [part.buffer(problem) for part in made] if conv else []
    return ConvInputs(target, made, outs, buffers, accepted)
