"""What every case shares: the setup it runs in, random inputs, and comparisons with the float64 recurrence.

A case is data and code that know nothing of a backend: the torch, interpreter and GPU tests run the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bole_runtime.factors import Factors, PendingChain
from bole_runtime.tree import TreeBatch

NAN = float("nan")


@dataclass(frozen=True)
class Setup:
    """How a case runs.

    Attributes:
        verify: :func:`bole_runtime.verify`, or a wrapper that pins a backend or a variant.
        commit: :func:`bole_runtime.commit`, likewise.
        device: where the tensors live.
        in_dtype: dtype of q, k and v.
        state_dtype: dtype of the pool.
        precision: ``fast`` or ``lossless``.
    """

    verify: Callable[..., tuple[torch.Tensor, Factors]]
    commit: Callable[..., None]
    device: torch.device
    in_dtype: torch.dtype
    state_dtype: torch.dtype
    precision: str

    @property
    def output_bound(self) -> float:
        """Relative error allowed for an fp32 output."""
        return 5e-6 if self.precision == "lossless" else 3e-3

    @property
    def state_bound(self) -> float:
        """Relative error allowed for a committed state, its own rounding included."""
        exact = 1e-6 if self.precision == "lossless" else 3e-3
        # Rounding to nearest: half a unit in the last place, in the mean less.
        return exact + {torch.bfloat16: 2**-9, torch.float16: 2**-12}.get(self.state_dtype, 0.0)


@dataclass(frozen=True)
class Case:
    """A named case.

    Attributes:
        name: test id.
        body: the test, given a :class:`Setup`.
        cost: ``small`` runs in an interpreter within seconds, ``medium`` does not, ``large`` needs a GPU.
        in_dtypes: input dtypes the case is about; empty for any.
    """

    name: str
    body: Callable[[Setup], None]
    cost: str = "small"
    in_dtypes: tuple[torch.dtype, ...] = ()

    def run(
        self,
        verify: Callable[..., Any],
        commit: Callable[..., Any],
        device: torch.device | str,
        in_dtype: torch.dtype,
        state_dtype: torch.dtype,
        precision: str,
    ) -> None:
        """Run the case; raises AssertionError when it fails."""
        self.body(Setup(verify, commit, torch.device(device), in_dtype, state_dtype, precision))

    def applies(self, in_dtype: torch.dtype) -> bool:
        """Return whether the case is about this input dtype."""
        return not self.in_dtypes or in_dtype in self.in_dtypes


def case(registry: list[Case], **options: Any) -> Callable[[Callable[[Setup], None]], Callable[[Setup], None]]:
    """Register a function as a case under its own name."""

    def add(body: Callable[[Setup], None]) -> Callable[[Setup], None]:
        registry.append(Case(body.__name__, body, **options))
        return body

    return add


@dataclass(frozen=True)
class Inputs:
    """Arguments of a verification. ``pending`` and ``options`` pass through to the call and to the oracle."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gates: dict[str, Any]
    state: torch.Tensor
    slots: torch.Tensor
    tree: TreeBatch
    options: dict[str, Any] = field(default_factory=dict)

    def replace(self, **changes: Any) -> Inputs:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of verify and of the sequential reference."""
        return {"gates": self.gates, "state": self.state, "slots": self.slots, "tree": self.tree, **self.options}

    @property
    def live(self) -> torch.Tensor:
        """Live rows, bool, of the leading shape of q."""
        return self.tree.depths >= 0


def random_parents(rng: random.Random, nodes: int, *, padding: float = 0.0, roots: float = 0.1) -> list[int]:
    """Return a random forest in topological order; some nodes are padding, with no live node below them."""
    parents: list[int] = []
    for i in range(nodes):
        above = [j for j in range(i) if parents[j] != -2]
        if rng.random() < padding:
            parents.append(-2)
        elif not above or rng.random() < roots:
            parents.append(-1)
        else:
            # Half of the nodes continue the newest branch, so that trees are deep as well as wide.
            parents.append(above[-1] if rng.random() < 0.5 else rng.choice(above))
    return parents


def dense_tree(setup: Setup, rows: Sequence[Sequence[int]], max_depth: int | None = None) -> TreeBatch:
    """Build a dense tree on the setup's device."""
    return TreeBatch.from_parents(torch.tensor(rows, dtype=torch.int32, device=setup.device), max_depth)


def packed_tree(setup: Setup, rows: Sequence[Sequence[int]], max_nodes: int | None = None, spare: int = 0) -> TreeBatch:
    """Build a packed tree; ``spare`` rows at the end belong to no request."""
    flat = [p for row in rows for p in row] + [-2] * spare
    ends = [sum(len(row) for row in rows[:i]) for i in range(len(rows) + 1)]
    return TreeBatch.from_packed(
        torch.tensor(flat, dtype=torch.int32, device=setup.device),
        torch.tensor(ends, dtype=torch.int32, device=setup.device),
        max_nodes or max(1, *(len(row) for row in rows)),
    )


def chain_tree(setup: Setup, batch: int, nodes: int) -> TreeBatch:
    """Build one chain a request."""
    return dense_tree(setup, [list(range(-1, nodes - 1))] * batch)


def make_inputs(
    setup: Setup,
    tree: TreeBatch,
    *,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (32, 32),
    mode: str = "ready",
    slots: Sequence[int] | None = None,
    pool_slots: int | None = None,
    seed: int = 0,
    poison: bool = True,
    **options: Any,
) -> Inputs:
    """Return random inputs of a layer.

    Args:
        setup: dtypes and device.
        tree: topology.
        heads: HK, HV.
        dims: dk, dv.
        mode: ``ready`` or ``raw`` gates.
        slots: default, distinct rows of the pool in a shuffled order.
        pool_slots: default, two more than the batch.
        seed: of everything drawn here.
        poison: put NaN in padding rows, in unused slots, and in rows of padding slots.
        **options: further arguments of verify.
    """
    gen = torch.Generator().manual_seed(seed)
    (key_heads, value_heads), (dk, dv) = heads, dims
    lead = tree.lead
    total = pool_slots if pool_slots is not None else tree.max_batch + 2
    if slots is None:
        slots = torch.randperm(total, generator=gen)[: tree.max_batch].tolist()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen)

    data = {"q": normal(*lead, key_heads, dk), "k": normal(*lead, key_heads, dk), "v": normal(*lead, value_heads, dv)}
    gates = ready_gates(lead, value_heads, gen) if mode == "ready" else raw_gates(lead, value_heads, gen)
    state = normal(total, value_heads, dv, dk)
    if poison:
        dead = tree.depths.cpu() < 0
        if not tree.is_packed:
            dead = dead | (torch.tensor(list(slots)) < 0).unsqueeze(1)
        for t in (*data.values(), *(t for t in gates.values() if t.dim() > 1)):
            t[dead] = NAN
        unused = [i for i in range(total) if i not in set(slots)]
        state[unused] = NAN
    return Inputs(
        **{name: t.to(setup.in_dtype).to(setup.device) for name, t in data.items()},
        gates={name: t.to(setup.device) for name, t in gates.items()},
        state=state.to(setup.state_dtype).to(setup.device),
        slots=torch.tensor(list(slots), dtype=torch.int32, device=setup.device),
        tree=tree,
        options=options,
    )


def ready_gates(lead: Sequence[int], heads: int, gen: torch.Generator) -> dict[str, torch.Tensor]:
    """Return g and beta, fp32 [..., heads], in the range of trained models."""
    g = -torch.rand(*lead, heads, generator=gen) * torch.tensor([0.01, 0.1, 1.0, 3.0]).repeat(heads)[:heads]
    return {"g": g, "beta": torch.rand(*lead, heads, generator=gen)}


def raw_gates(lead: Sequence[int], heads: int, gen: torch.Generator) -> dict[str, torch.Tensor]:
    """Return a, b, A_log and dt_bias, fp32."""
    return {
        "a": torch.randn(*lead, heads, generator=gen) * 2,
        "b": torch.randn(*lead, heads, generator=gen) * 2,
        "A_log": torch.rand(heads, generator=gen).mul(16).add(0.1).log(),
        "dt_bias": torch.randn(heads, generator=gen) - 3,
    }


def make_pending(
    setup: Setup, inputs: Inputs, capacity: int, lengths: Sequence[int], starts: Sequence[int], seed: int = 7
) -> PendingChain:
    """Return a pending chain of random tokens with ready gates, whatever the inputs have; rows outside it hold NaN."""
    gen = torch.Generator().manual_seed(seed)
    total = inputs.state.shape[0]
    heads = inputs.v.shape[-2]
    k = torch.randn(total, capacity, *inputs.k.shape[-2:], generator=gen)
    v = torch.randn(total, capacity, *inputs.v.shape[-2:], generator=gen)
    gates = ready_gates((total, capacity), heads, gen)
    for s in range(total):
        used = {(starts[s] + t) % capacity for t in range(lengths[s])}
        unused = [i for i in range(capacity) if i not in used]
        for t in (k, v, *gates.values()):
            t[s, unused] = NAN
    return PendingChain(
        k.to(setup.in_dtype).to(setup.device),
        v.to(setup.in_dtype).to(setup.device),
        {name: t.to(setup.device) for name, t in gates.items()},
        torch.tensor(list(lengths), dtype=torch.int32, device=setup.device),
        torch.tensor(list(starts), dtype=torch.int32, device=setup.device),
    )


def leaves(tree: TreeBatch) -> list[int]:
    """Return the last live node of every request, -1 where there is none."""
    _, live = tree.rows()
    return [max((i for i, on in enumerate(row) if on), default=-1) for row in live.tolist()]
