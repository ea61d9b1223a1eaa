"""A commit of keys that nearly repeat with strong writes: where the update erases, nothing dampens a rounding there.

Random keys hardly meet one another, so that a check of them lets through what is off on keys such as a model makes of
one token again and again. Every slot is judged by an error of its own, since one bad chain would be lost in a norm over
all of them. Few roundings decide it: that of a key's length comes back at every token. So there are many slots, and
what the recurrence itself gets wrong in fp32 is allowed: to each twice the worst, to all in the mean a quarter more.
Variant ``steps`` has 0.6 to 1.2 times that mean, ``path`` 1.3 to 3.5 (interpreted; 16 to 128 key dims, a full chain
of 16 and a path of 4 or 13).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from bole_codegen.measure.inputs import TORCH_DTYPES
from bole_codegen.search.results import CandidateError
from bole_runtime import Config, Factors, PendingChain, TreeBatch, commit, get_family
from bole_runtime.families.spec import InputSpec
from bole_runtime.kernels.problem import Problem
from bole_runtime.precision import STATE_BOUND, STATE_ROUNDING
from bole_runtime.reference import commit_sequential

NOISE = 0.03
#: Ready write gates of a row of the batch, and the sign of every second key. With 2 an update reflects.
_BETAS = 4 * ((2.0, 1.0), (1.97, 1.0), (1.999, -1.0), (1.99, 1.0))
#: Of the worst and of the mean error of the recurrence in fp32, over paths of one length.
_WORST, _MEAN = 2.0, 1.25
#: Raw gates are logits: softplus makes no decay of the first, a sigmoid 0.9975 of the second.
_NO_DECAY, _STRONG = -100.0, 6.0
#: Nodes of the longest path: a reference goes token by token, and hardly a round accepts more.
_LONGEST = 64
#: Index of the last node of the other paths, such as most rounds accept.
_SHORT = 3


def applies(problem: Problem) -> bool:
    """Whether a problem is a commit that erases along the very keys it writes: others have rows of their own."""
    spec = get_family(problem.family)
    return problem.op == "commit" and spec.plain and spec.erase != "none"


class NearKeys:
    """The check. Its inputs and its reference are made on the CPU, once.

    Args:
        problem: a commit; geometry, element types, gate mode, node and pending buckets are its own.
        device: where candidates run.
        seed: every seed gives other inputs.
    """

    def __init__(self, problem: Problem, device: torch.device | str, seed: int) -> None:
        self._precision = problem.precision
        factors, pool = _draw(problem, seed)
        rows = pool.shape[0]
        deepest = factors.tree.max_nodes - 1
        accepted = [min(_LONGEST - 1, deepest)] * len(_BETAS) + [min(_SHORT, deepest)] * len(_BETAS)
        slots, last = torch.arange(rows, dtype=torch.int32), torch.tensor(accepted, dtype=torch.int32)
        want = commit_sequential(pool, slots, factors, last)
        single = commit_sequential(pool, slots, factors, last, dtype=torch.float32)
        exact, rounding = STATE_BOUND[problem.precision], STATE_ROUNDING[problem.state_dtype]
        #: Of each length of paths: the largest error of a slot, and the largest root of the mean square.
        self.limits = tuple(
            (rounding + max(exact, _WORST * max(part)), rounding + max(exact, _MEAN * _mean(part)))
            for part in _halves(_errors(single, want))
        )
        self._want = want.to(device)
        self._pool, self._slots, self._last = pool.to(device), slots.to(device), last.to(device)
        self._factors = _moved(factors, device)

    def errors(self, config: Config | None) -> list[float]:
        """Commit every row and return the relative error of each."""
        pool = self._pool.clone()
        commit(pool, self._slots, self._factors, self._last, precision=self._precision, variant=config, validate=False)
        return _errors(pool, self._want)

    def run(self, config: Config | None) -> None:
        """Commit every row.

        Raises:
            CandidateError: a slot, or all of one length in the mean, are further off than their limit.
        """
        for errors, (worst, mean) in zip(_halves(self.errors(config)), self.limits, strict=True):
            for error, limit, whose in ((max(errors), worst, "of a slot"), (_mean(errors), mean, "in the mean")):
                if not error <= limit:
                    raise CandidateError(
                        "wrong", f"relative error {error:.3g} {whose} is above {limit:.3g} where keys nearly repeat"
                    )


def _errors(got: Tensor, want: Tensor) -> list[float]:
    """Return the relative error of every row. It is infinite where one is not finite."""
    norms = (got.double() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
    return [float(error) for error in norms.nan_to_num(math.inf).tolist()]


def _halves(values: list[float]) -> tuple[list[float], list[float]]:
    """Split values of the rows into those of the long paths and of the short ones."""
    return values[: len(_BETAS)], values[len(_BETAS) :]


def _mean(errors: list[float]) -> float:
    return math.sqrt(sum(error * error for error in errors) / len(errors))


def _draw(problem: Problem, seed: int) -> tuple[Factors, Tensor]:
    """Return factors of chains on top of full rings, and a pool with a slot a row."""
    spec = get_family(problem.family)
    hk, rows = 2, 2 * len(_BETAS)
    heads, dims = (hk, hk * problem.group), (problem.dk, problem.dv)
    nodes = problem.nodes - 3 if problem.nodes >= 16 else problem.nodes
    dtype = TORCH_DTYPES[problem.in_dtype]
    gen = torch.Generator().manual_seed(seed + 2)
    base = torch.randn(rows, 1, hk, problem.dk, generator=gen)
    betas = torch.tensor([beta for beta, _ in _BETAS]).repeat(2)
    signs = torch.tensor([sign for _, sign in _BETAS]).repeat(2).reshape(-1, 1, 1, 1)

    def keys(count: int) -> Tensor:
        made = base + NOISE * torch.randn(rows, count, hk, problem.dk, generator=gen)
        if not spec.qk_l2norm:
            made = made / made.norm(dim=-1, keepdim=True)
        made[:, 1::2] *= signs
        return made.to(dtype)

    def gate(spec_of: InputSpec, mode: str, *lead: int) -> Tensor:
        sizes = (*lead, *spec_of.sizes(heads, dims))
        if spec_of.role == "log_decay":
            value = torch.full(sizes, 0.0 if mode == "ready" else _NO_DECAY)
        elif spec_of.role != "write_gate":
            value = torch.randn(sizes, generator=gen)
        elif mode == "ready":
            value = betas.reshape(-1, *[1] * (len(sizes) - 1)).expand(sizes).clone()
        else:
            value = _STRONG + torch.randn(sizes, generator=gen).abs()
        return value if mode == "ready" else value.to(dtype)

    mode = problem.gate_mode
    gates = {i.name: gate(i, mode, rows, nodes) for i in spec.node_gates(mode)}
    gates |= {i.name: torch.zeros(i.sizes(heads, dims)) for i in spec.parameters(mode) if i.name not in spec.skip}
    chain = None
    if problem.pending:
        kept, cap = spec.kept_mode(mode), problem.pending
        chain = PendingChain(
            keys(cap),
            torch.randn(rows, cap, heads[1], problem.dv, generator=gen).to(dtype),
            {i.name: gate(i, kept, rows, cap) for i in spec.node_gates(kept)},
            torch.full((rows,), cap, dtype=torch.int32),
            torch.arange(rows, dtype=torch.int32) * 5 % cap,
        )
    options = {i.name: float(i.default or 0.0) for i in spec.options(mode)}
    tree = TreeBatch.from_parents(torch.arange(-1, nodes - 1, dtype=torch.int32).expand(rows, nodes).contiguous())
    v = torch.randn(rows, nodes, heads[1], problem.dv, generator=gen).to(dtype)
    factors = Factors(
        spec, mode, keys(nodes), v, gates, options.pop("beta_scale", 1.0), spec.qk_l2norm, tree, chain, options
    )
    pool = torch.randn(rows, heads[1], problem.dv, problem.dk, generator=gen)
    return factors, pool.to(TORCH_DTYPES[problem.state_dtype])


def _moved(factors: Factors, device: torch.device | str) -> Factors:
    chain = factors.pending
    if chain is not None:
        gates = {name: t.to(device) for name, t in chain.gates.items()}
        chain = PendingChain(
            chain.k.to(device), chain.v.to(device), gates, chain.length.to(device), chain.start.to(device)
        )
    return replace(
        factors,
        k=factors.k.to(device),
        v=factors.v.to(device),
        gates={name: t.to(device) for name, t in factors.gates.items()},
        tree=TreeBatch.from_parents(factors.tree.parents.to(device)),
        pending=chain,
    )


__all__ = ["NearKeys", "applies"]
