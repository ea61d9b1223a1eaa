"""One small launch with its fp64 result: what a candidate has to agree with before its time counts.

The launch holds what goes wrong in practice: a node count that is no power of two, padding nodes, a padding row full
of NaN, unused slots full of NaN, guard regions around everything that is written, a second run that must give the
same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bole_codegen.measure import make_parents, make_verify_inputs, poison_, relative_error
from bole_codegen.search.near_keys import NearKeys, applies
from bole_codegen.search.operands import Operands, make_pending, on_torch
from bole_codegen.search.results import CandidateError
from bole_runtime import Config, Factors, TreeBatch, commit, get_family
from bole_runtime.backends.scratch import poisoned
from bole_runtime.kernels.problem import Problem
from bole_runtime.precision import OUTPUT_BOUND, STATE_BOUND, STATE_ROUNDING

GUARD = 4096
_BATCH = 4
_SLOTS = (3, -1, 0, 5)
_POOL = 7


def bound(problem: Problem) -> float:
    """Return the largest relative error a candidate may have."""
    if problem.op == "verify":
        return OUTPUT_BOUND[problem.precision]
    return STATE_BOUND[problem.precision] + STATE_ROUNDING[problem.state_dtype]


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers, so that NaN equals itself."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(kind)


@dataclass
class Guarded:
    """A tensor in the middle of a larger one whose borders must not change."""

    whole: Tensor
    inner: Tensor
    before: Tensor

    @classmethod
    def like(cls, tensor: Tensor) -> Guarded:
        """Copy a tensor into the middle of a guarded one."""
        size = tensor.numel()
        whole = torch.full((size + 2 * GUARD,), 12345.0, dtype=tensor.dtype, device=tensor.device)
        inner = whole[GUARD : GUARD + size].view(tensor.shape)
        inner.copy_(tensor)
        return cls(whole, inner, bits(whole[:GUARD]).clone())

    def intact(self) -> bool:
        """Return whether both borders are as they were."""
        return bool(
            (bits(self.whole[:GUARD]) == self.before).all() and (bits(self.whole[-GUARD:]) == self.before).all()
        )


def small_operands(problem: Problem, device: torch.device | str, seed: int) -> Operands:
    """Draw the operands of a check."""
    hk = 2
    hv = hk * problem.group
    nodes = problem.nodes - 3 if problem.nodes >= 16 else problem.nodes
    inputs = make_verify_inputs(problem, hk, hv, _BATCH, nodes, "ragged", 1, seed, device, extra_slots=_POOL - _BATCH)
    layer = inputs.layers[0]
    parents = torch.from_numpy(make_parents("ragged", _BATCH, nodes, seed)).to(device)
    parents[0] = torch.arange(-1, nodes - 1)  # One chain: the deepest tree there is.
    parents[3, nodes - 2 :] = -2
    state, slots = layer.state, torch.tensor(_SLOTS, dtype=torch.int32, device=device)
    used = [s for s in _SLOTS if s >= 0]
    state[[s for s in range(_POOL) if s not in used]] = math.nan
    gates = dict(layer.gates(problem.gate_mode))
    nodes_gates = [gates[i.name] for i in get_family(problem.family).node_gates(problem.gate_mode)]
    for tensor in (layer.q, layer.k, layer.v, *nodes_gates):
        tensor[1] = math.nan
        tensor[3, nodes - 2 :] = math.nan
    pending = make_pending(problem, hk, hv, _POOL, layer.q, seed + 1, full=False) if problem.pending else None
    tree = TreeBatch.from_parents(parents.to(torch.int32), validate=False)
    return Operands(layer.q, layer.k, layer.v, gates, state, slots, tree, pending)


class CheckCase:
    """A check of one class of kernels: inputs drawn once, the reference computed once.

    Args:
        problem: decides geometry, element types, gate mode, node and pending buckets.
        device: where candidates run.
        seed: every seed gives other inputs.
    """

    def __init__(self, problem: Problem, device: torch.device | str, seed: int) -> None:
        self.problem = problem
        self._seed = seed
        self.operands = small_operands(problem, device, seed)
        # From before any launch: what the first one writes, a later one may write again.
        self._state = bits(self.operands.state).clone()
        wide = self.operands.double()
        slots = self.operands.slots
        if problem.op == "verify":
            self.reference: Tensor = on_torch(lambda: wide.verify(problem, None, None))[0]
            # Timed launches capture factors, and have the output type of the inputs.
            self._buffers = self.operands.buffers(problem)
            return
        depths = self.operands.tree.depths.cpu()
        deepest = int(depths[0].argmax())
        self.accepted = torch.tensor([deepest, 0, -1, 2], dtype=torch.int32, device=slots.device)
        self.reference = wide.state.clone()

        def fold() -> None:
            _, factors = wide.verify(problem, None, None)
            commit(self.reference, slots, factors, self.accepted, precision=problem.precision, validate=False)

        on_torch(fold)
        self.factors: Factors = on_torch(lambda: self.operands.verify(problem, None, None))[1]

    @cached_property
    def near(self) -> NearKeys | None:
        """The commit of keys that nearly repeat, drawn when it is first asked for: few candidates come that far."""
        problem = self.problem
        return NearKeys(problem, self.operands.state.device, self._seed) if applies(problem) else None

    def run(self, config: Config | None) -> float:
        """Run a candidate and return its relative error, on random keys.

        Raises:
            CandidateError: it is wrong, leaves elements unwritten, writes elsewhere, or differs from run to run.
        """
        if self.problem.op == "commit":
            error = self._commit(config, (1, 2, 1))  # One layer, two layers in one launch, and once more.
            if self.near is not None:
                self.near.run(config)
            return error
        exact, error = self._verify(config, torch.float32)
        self._as_timed(config, exact)
        return error

    def gate(self, config: Config | None) -> float:
        """Run the launch that is timed alone, for a first look: every fault shows but a small loss of precision.

        Raises:
            CandidateError: as :meth:`run`.
        """
        if self.problem.op == "commit":
            return self._commit(config, (2, 2))
        return self._verify(config, self.operands.v.dtype)[1]

    def launch(self, config: Config | None, full: bool) -> None:
        """Launch a candidate once, for what comes of it; ``full`` as for :meth:`run`, else as for :meth:`gate`."""
        ops = self.operands
        if self.problem.op == "verify":
            kind = torch.float32 if full else ops.v.dtype
            out = torch.empty(self.reference.shape, dtype=kind, device=ops.v.device)
            ops.verify(self.problem, Guarded.like(out).inner, config, None if full else self._buffers)
            return
        if full and self.near is not None:
            self.near.errors(config)
        layers = 1 if full else 2
        self._fold([Guarded.like(ops.state).inner for _ in range(layers)], config)

    def _fold(self, pools: list[Tensor], config: Config | None) -> None:
        alone = len(pools) == 1
        commit(
            pools[0] if alone else pools,
            self.operands.slots,
            self.factors if alone else [self.factors] * len(pools),
            self.accepted,
            precision=self.problem.precision,
            variant=config,
            validate=False,
        )

    def _judge(self, got: Tensor, want: Tensor, rounding: float = 0.0) -> float:
        if bool(torch.isnan(got).any()):
            raise CandidateError("nan", f"{int(torch.isnan(got).sum())} of {got.numel()} elements are NaN or unwritten")
        error = relative_error(got, want)
        limit = bound(self.problem) + rounding
        if not error <= limit:
            raise CandidateError("wrong", f"relative error {error:.3g} is above {limit:.3g}")
        return error

    def _verify(self, config: Config | None, dtype: torch.dtype) -> tuple[Tensor, float]:
        ops = self.operands
        blank = torch.empty(self.reference.shape, dtype=dtype, device=self.reference.device)
        capture = self._buffers if dtype == ops.v.dtype else None
        runs = []
        for _ in range(2):
            out = Guarded.like(poison_(blank))
            with poisoned():
                ops.verify(self.problem, out.inner, config, capture)
            if not out.intact():  # Fatal: it may have hit what later checks rely on.
                raise CandidateError("bounds", "wrote outside the output", fatal=True)
            if not bool((bits(ops.state) == self._state).all()):
                raise CandidateError("bounds", "wrote to the state pool", fatal=True)
            runs.append(out.inner)
        error = self._judge(runs[0], self.reference, torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0)
        if not bool((bits(runs[0]) == bits(runs[1])).all()):
            raise CandidateError("races", "two runs on the same inputs gave different bits")
        return runs[0], error

    def _as_timed(self, config: Config | None, exact: Tensor) -> None:
        """Run as timings do: it is compiled here, in one of many workers, and not there."""
        ops = self.operands
        if ops.v.dtype == exact.dtype:
            return
        out = poison_(torch.empty_like(exact, dtype=ops.v.dtype))
        ops.verify(self.problem, out, config, self._buffers)
        if not torch.allclose(out.float(), exact.to(out.dtype).float(), rtol=0.0, atol=0.0, equal_nan=True):
            raise CandidateError("wrong", f"the {self.problem.in_dtype} output is not the rounded fp32 output")

    def _commit(self, config: Config | None, launches: tuple[int, ...]) -> float:
        ops = self.operands
        changed = torch.zeros(ops.state.shape[0], dtype=torch.bool)
        changed[[s for s, a in zip(ops.slots.tolist(), self.accepted.tolist(), strict=True) if s >= 0 and a >= 0]] = (
            True
        )
        changed = changed.to(ops.state.device)
        before = bits(ops.state)
        error = 0.0
        runs = []
        for layers in launches:
            pools = [Guarded.like(ops.state) for _ in range(layers)]
            inner = [p.inner for p in pools]
            self._fold(inner, config)
            for pool in pools:
                if not pool.intact():
                    raise CandidateError("bounds", "wrote outside the state pool", fatal=True)
                if not bool((bits(pool.inner)[~changed] == before[~changed]).all()):
                    raise CandidateError("bounds", "wrote to a slot that is not committed", fatal=True)
                error = max(error, self._judge(pool.inner[changed], self.reference[changed]))
            runs.append(inner[0])
        if not bool((bits(runs[0]) == bits(runs[-1])).all()):
            raise CandidateError("races", "two runs on the same inputs gave different bits")
        return error
