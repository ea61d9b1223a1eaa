"""The check of convolutions, as ``case.py`` is that of recurrences: small launches with their exact results.

One launch has the nodes of the bucket and is the one that is timed. The other has fewer, no power of two, and an fp32
output: neither fills a kernel's blocks of nodes or of channels. Both hold padding nodes, a padding row full of NaN and
unused slots full of NaN, with guard regions around everything that is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bole_codegen.measure import make_parents, poison_, relative_error
from bole_codegen.search.case import Guarded, bits
from bole_codegen.search.conv_operands import ConvOperands, draw_conv, draw_ring
from bole_codegen.search.convolution import odd_nodes
from bole_codegen.search.results import CandidateError
from bole_runtime import Config, ConvFactors, TreeBatch, conv_commit
from bole_runtime.kernels.conv_problem import ConvProblem

#: Relative error of an fp32 output, in the Frobenius norm: sums and SiLU are fp32.
BOUND = 1e-6
_BATCH = 4
_SLOTS = (3, -1, 0, 5)
_POOL = 7


def bound(dtype: torch.dtype) -> float:
    """Return the largest relative error that an output of a type may have: its own rounding comes on top."""
    return BOUND + (torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0)


def odd_channels(problem: ConvProblem) -> int:
    """Return channels of the bucket that fill no block, a multiple of 16 as kernels expect it."""
    return problem.channels - 16 if problem.channels >= 64 else problem.channels


def small_conv(problem: ConvProblem, nodes: int, device: torch.device | str, seed: int) -> ConvOperands:
    """Draw the operands of a check."""
    channels = odd_channels(problem)
    parents = torch.from_numpy(make_parents("ragged", _BATCH, nodes, seed)).to(device)
    parents[0] = torch.arange(-1, nodes - 1)  # One chain: the deepest tree there is.
    parents[3, nodes - 2 :] = -2
    tree = TreeBatch.from_parents(parents.to(torch.int32), validate=False)
    slots = torch.tensor(_SLOTS, dtype=torch.int32, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    ring = draw_ring(problem, channels, _POOL, device, seed + 1, full=False)
    made = draw_conv(problem, channels, _POOL, tree, slots, ring, generator)
    made.state[[s for s in range(_POOL) if s not in _SLOTS]] = math.nan
    for tensor in (made.x, *((made.weight,) if problem.dynamic else ())):
        tensor[1] = math.nan
        tensor[3, nodes - 2 :] = math.nan
    return made


@dataclass
class _Launch:
    """Operands with their exact output, and the bits of the pool from before any launch."""

    operands: ConvOperands
    reference: Tensor
    state: Tensor

    @classmethod
    def of(cls, problem: ConvProblem, nodes: int, device: torch.device | str, seed: int) -> _Launch:
        operands = small_conv(problem, nodes, device, seed)
        return cls(operands, operands.exact(problem), bits(operands.state).clone())


class ConvCase:
    """A check of one class of kernels: inputs drawn once, the reference computed once.

    Args:
        problem: decides geometry, element types, node and pending buckets.
        device: where candidates run.
        seed: every seed gives other inputs.
    """

    def __init__(self, problem: ConvProblem, device: torch.device | str, seed: int) -> None:
        self.problem = problem
        if problem.op == "tree_conv":
            self._timed = _Launch.of(problem, problem.nodes, device, seed)
            self._odd = _Launch.of(problem, odd_nodes(problem.nodes), device, seed + 2)
            self._buffer = self._timed.operands.buffer(problem)
            return
        self.operands = small_conv(problem, odd_nodes(problem.nodes), device, seed)
        deepest = int(self.operands.tree.depths.cpu()[0].argmax())
        self.accepted = torch.tensor([deepest, 0, -1, 2], dtype=torch.int32, device=device)
        self.reference = self.operands.committed(problem, self.accepted)

    def run(self, config: Config | None) -> float:
        """Check every form of launch and return the relative error; 0 of a commit, which moves inputs.

        Raises:
            CandidateError: it is wrong, leaves elements unwritten, writes elsewhere, or differs from run to run.
        """
        if self.problem.op == "conv_commit":
            return self._commit(config, (1, 2, 1))  # One layer, two layers in one launch, and once more.
        error = self._conv(self._odd, config, torch.float32, None)
        self.gate(config)
        return error

    def gate(self, config: Config | None) -> float:
        """Check the launch that is timed.

        Raises:
            CandidateError: as :meth:`run`.
        """
        if self.problem.op == "conv_commit":
            return self._commit(config, (2, 2))
        error = self._conv(self._timed, config, self._timed.operands.x.dtype, poison_buffer(self._buffer))
        self._captured()
        return error

    def launch(self, config: Config | None, full: bool) -> None:
        """Launch a candidate once, for what comes of it; ``full`` as for :meth:`run`, else as for :meth:`gate`."""
        if self.problem.op == "conv_commit":
            self._fold([Guarded.like(self.operands.state).inner for _ in range(1 if full else 2)], config)
            return
        which = self._odd if full else self._timed
        dtype = torch.float32 if full else which.operands.x.dtype
        out = torch.empty(which.reference.shape, dtype=dtype, device=which.reference.device)
        which.operands.conv(self.problem, Guarded.like(out).inner, config, None if full else self._buffer)

    def _conv(self, case: _Launch, config: Config | None, dtype: torch.dtype, capture: ConvFactors | None) -> float:
        blank = torch.empty(case.reference.shape, dtype=dtype, device=case.reference.device)
        runs = []
        for _ in range(2):
            out = Guarded.like(poison_(blank))
            case.operands.conv(self.problem, out.inner, config, capture)
            if not out.intact():  # Fatal: it may have hit what later checks rely on.
                raise CandidateError("bounds", "wrote outside the output", fatal=True)
            if not bool((bits(case.operands.state) == case.state).all()):
                raise CandidateError("bounds", "wrote to the state pool", fatal=True)
            runs.append(out.inner)
        error = _judge(runs[0], case.reference, bound(dtype))
        if not bool((bits(runs[0]) == bits(runs[1])).all()):
            raise CandidateError("races", "two runs on the same inputs gave different bits")
        return error

    def _captured(self) -> None:
        """Compare what a launch copied; of padding nodes nothing is read."""
        ops = self._timed.operands
        live = (ops.tree.depths >= 0) & (ops.slots >= 0)[:, None]
        if not bool((bits(self._buffer.x[live]) == bits(ops.x[live])).all()):
            raise CandidateError("wrong", "the copy of the inputs differs from them")

    def _fold(self, pools: list[Tensor], config: Config | None) -> None:
        factors, alone = self.operands.factors(self.problem), len(pools) == 1
        conv_commit(
            pools[0] if alone else pools,
            self.operands.slots,
            factors if alone else [factors] * len(pools),
            self.accepted,
            variant=config,
            validate=False,
        )

    def _commit(self, config: Config | None, launches: tuple[int, ...]) -> float:
        ops = self.operands
        changed = torch.zeros(_POOL, dtype=torch.bool)
        taken = zip(ops.slots.tolist(), self.accepted.tolist(), strict=True)
        changed[[s for s, a in taken if s >= 0 and a >= 0]] = True
        changed = changed.to(ops.state.device)
        want = bits(self.reference)
        for layers in launches:
            pools = [Guarded.like(ops.state) for _ in range(layers)]
            self._fold([p.inner for p in pools], config)
            for pool in pools:
                if not pool.intact():
                    raise CandidateError("bounds", "wrote outside the state pool", fatal=True)
                got = bits(pool.inner)
                if not bool((got[~changed] == want[~changed]).all()):
                    raise CandidateError("bounds", "wrote to a slot that is not committed", fatal=True)
                if not bool((got[changed] == want[changed]).all()):
                    raise CandidateError("wrong", "the state is not the last inputs of state and path")
        return 0.0


def poison_buffer(buffer: ConvFactors) -> ConvFactors:
    """Fill a buffer with NaN, so that what is not copied shows."""
    poison_(buffer.x)
    return buffer


def _judge(got: Tensor, want: Tensor, limit: float) -> float:
    if bool(torch.isnan(got).any()):
        raise CandidateError("nan", f"{int(torch.isnan(got).sum())} of {got.numel()} elements are NaN or unwritten")
    error = relative_error(got, want)
    if not error <= limit:
        raise CandidateError("wrong", f"relative error {error:.3g} is above {limit:.3g}")
    return error
