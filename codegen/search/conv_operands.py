"""Operands of a convolution that a search checks or times."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bole_codegen.search.operands import on_torch
from bole_runtime import Config, ConvFactors, ConvPending, TreeBatch, conv_commit, tree_conv
from bole_runtime.kernels.conv_problem import ConvProblem

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class ConvOperands:
    """Arguments of one convolution, without the output."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor
    slots: Tensor
    tree: TreeBatch
    pending: ConvPending | None

    def double(self) -> ConvOperands:
        """Return the same values in fp64."""
        pending = self.pending
        if pending is not None:
            pending = ConvPending(pending.x.double(), pending.length, pending.start)
        bias = None if self.bias is None else self.bias.double()
        return ConvOperands(
            self.x.double(), self.weight.double(), bias, self.state.double(), self.slots, self.tree, pending
        )

    def conv(
        self, problem: ConvProblem, out: Tensor | None, config: Config | None, capture: ConvFactors | None = None
    ) -> Tensor:
        """Call ``tree_conv``, which copies its inputs to a buffer if it has one."""
        return tree_conv(
            self.x,
            self.weight,
            self.bias,
            state=self.state,
            slots=self.slots,
            tree=self.tree,
            activation="silu" if problem.silu else None,
            out=out,
            factors=capture,
            pending=self.pending,
            variant=config,
            validate=False,
        )[0]

    def exact(self, problem: ConvProblem) -> Tensor:
        """Return the output in fp64."""
        wide = self.double()
        found: Tensor = on_torch(lambda: wide.conv(problem, None, None))
        return found

    def factors(self, problem: ConvProblem) -> ConvFactors:
        """Return the inputs as what a commit reads."""
        return ConvFactors(self.x, problem.width, self.tree, self.pending)

    def buffer(self, problem: ConvProblem) -> ConvFactors:
        """Allocate what a call copies its inputs to."""
        return ConvFactors.allocate(self.tree, channels=self.x.shape[-1], width=problem.width, dtype=self.x.dtype)

    def committed(self, problem: ConvProblem, accepted: Tensor) -> Tensor:
        """Return the pool as the torch backend commits it: in its own type, since inputs are moved, not computed."""
        pool = self.state.clone()
        on_torch(lambda: conv_commit(pool, self.slots, self.factors(problem), accepted, validate=False))
        return pool


def draw_conv(
    problem: ConvProblem,
    channels: int,
    pool: int,
    tree: TreeBatch,
    slots: Tensor,
    pending: ConvPending | None,
    generator: torch.Generator,
) -> ConvOperands:
    """Draw the tensors of one layer.

    Args:
        problem: decides everything but the sizes.
        channels: of the launch.
        pool: slots of the pool.
        tree: topology.
        slots: of the requests.
        pending: rings, or None.
        generator: of the device of the tree.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=tree.device)

    dtype = DTYPES[problem.in_dtype]
    lead = tree.lead if problem.dynamic else ()
    taps = problem.width if problem.op == "tree_conv" else 0  # A commit reads none.
    return ConvOperands(
        x=normal(*tree.lead, channels).to(dtype),
        weight=normal(*lead, channels, taps).to(dtype),
        bias=normal(channels).to(dtype) if problem.bias else None,
        state=normal(pool, channels, problem.length).to(DTYPES[problem.state_dtype]),
        slots=slots,
        tree=tree,
        pending=pending,
    )


def draw_ring(
    problem: ConvProblem, channels: int, pool: int, device: torch.device | str, seed: int, full: bool
) -> ConvPending | None:
    """Draw the pending inputs of the bucket's capacity, None without any; every ring full, or of lengths from 0."""
    if not problem.pending:
        return None
    generator, cap = torch.Generator(device=device).manual_seed(seed), problem.pending

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (pool,), generator=generator, device=device, dtype=torch.int32)

    ring = torch.randn((pool, cap, channels), generator=generator, device=device).to(DTYPES[problem.in_dtype])
    length = torch.full((pool,), cap, dtype=torch.int32, device=device) if full else integers(0, cap + 1)
    return ConvPending(ring, length, integers(0, cap))
