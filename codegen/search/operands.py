"""Operands of a call that a search checks or times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bole_runtime import Config, Factors, PendingChain, TreeBatch, get_family, set_backend, verify
from bole_runtime.kernels.problem import Problem


@dataclass
class Operands:
    """Arguments of one call, without the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: dict[str, Any]
    state: Tensor
    slots: Tensor
    tree: TreeBatch
    pending: PendingChain | None

    def double(self) -> Operands:
        """Return the same values in fp64."""
        pending = self.pending
        if pending is not None:
            pending = PendingChain(
                pending.k.double(),
                pending.v.double(),
                {n: g.double() for n, g in pending.gates.items()},
                pending.length,
                pending.start,
            )
        gates = {n: g.double() if isinstance(g, Tensor) else g for n, g in self.gates.items()}
        return Operands(
            self.q.double(),
            self.k.double(),
            self.v.double(),
            gates,
            self.state.double(),
            self.slots,
            self.tree,
            pending,
        )

    def verify(
        self, problem: Problem, out: Tensor | None, config: Config | None, capture: Factors | None = None
    ) -> tuple[Tensor, Factors]:
        """Call ``verify`` on these operands, which captures factors in buffers if it has some."""
        return verify(
            self.q,
            self.k,
            self.v,
            gates=self.gates,
            state=self.state,
            slots=self.slots,
            tree=self.tree,
            recurrence=problem.family,
            precision=problem.precision,
            out=out,
            pending=self.pending,
            variant=config,
            factors=capture,
            validate=False,
        )

    def buffers(self, problem: Problem) -> Factors:
        """Allocate what a call captures its factors in."""
        dtype = self.k.dtype
        return Factors.allocate(
            self.tree,
            key_heads=self.k.shape[-2],
            value_heads=self.v.shape[-2],
            dk=problem.dk,
            dv=problem.dv,
            dtype=dtype,
            recurrence=problem.family,
            gate_mode=problem.gate_mode,
            gate_dtype=dtype if problem.gate_mode == "raw" else None,
        )


def on_torch(call: Callable[[], Any]) -> Any:
    """Run a call on the torch backend."""
    set_backend("torch")
    try:
        return call()
    finally:
        set_backend(None)


def make_pending(problem: Problem, hk: int, hv: int, slots: int, like: Tensor, seed: int, full: bool) -> PendingChain:
    """Draw a pending chain of the bucket's capacity; every ring full, or of random lengths from 0."""
    generator = torch.Generator(device=like.device).manual_seed(seed)
    cap = problem.pending

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=like.device)

    spec = get_family(problem.family)
    kept = spec.kept_mode(problem.gate_mode)
    sizes = (hk, hv), (problem.dk, problem.dv)
    gates = {i.name: normal(slots, cap, *i.sizes(*sizes)) for i in spec.node_gates(kept)}
    if kept != "ready":
        gates = {name: gate.to(like.dtype) for name, gate in gates.items()}
    for i in spec.node_gates("ready") if kept == "ready" else ():
        if i.role == "log_decay":
            gates[i.name].abs_().neg_()
        elif i.role == "write_gate":
            gates[i.name].sigmoid_()

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (slots,), generator=generator, device=like.device, dtype=torch.int32)

    length = torch.full((slots,), cap, dtype=torch.int32, device=like.device) if full else integers(0, cap + 1)
    return PendingChain(
        k=normal(slots, cap, hk, problem.dk).to(like.dtype),
        v=normal(slots, cap, hv, problem.dv).to(like.dtype),
        gates=gates,
        length=length,
        start=integers(0, cap),
    )
