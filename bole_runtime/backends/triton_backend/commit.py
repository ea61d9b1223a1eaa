"""Commit with generated kernels: one launch for all layers of a geometry. A row may also only flush or append."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bole_runtime.backends.triton_backend.reach import REACH, check_reach
from bole_runtime.backends.triton_backend.select import SHORT, buckets, choose, short_dtype
from bole_runtime.backends.triton_backend.verify import (
    chain_sizes,
    chain_tensors,
    gate_strides,
    option_values,
    rows_strides,
)
from bole_runtime.kernels.gates import gate_layout
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.variants import get_variant

if TYPE_CHECKING:
    from bole_runtime.calls import CommitCall, CommitLayer
    from bole_runtime.kernels.loader import LoadedKernel


#: Gates are widened or narrowed to fp32 where they are loaded, so that float64 ones need no kernels of their own.
_GATE_SHORT = {**SHORT, torch.float64: "fp64"}


def commit_problem(call: CommitCall, layer: CommitLayer) -> Problem:
    """Return what the kernels of a layer's commit are specialised for."""
    factors = layer.factors
    heads, dv = factors.v.shape[-2:]
    key_heads, dk = factors.k.shape[-2:]
    tree, pending = call.tree, factors.pending
    nodes, depth, capacity, work = buckets(
        "commit", tree.max_nodes, tree.max_depth, 0 if pending is None else pending.capacity, call.slots.shape[0], heads
    )
    layout = gate_layout(call.spec.name, factors.gate_mode)
    gates = [(name, factors.gates.get(name)) for name in layout.tensors]
    if pending is not None and not layout.keeps_ready:
        gates += [(name, pending.gates[name]) for name in layout.kept]
    return Problem(
        "commit",
        call.spec.name,
        dk,
        dv,
        heads // key_heads,
        SHORT.get(factors.k.dtype) or short_dtype(factors.k, "factors.k"),
        SHORT.get(layer.pool.dtype) or short_dtype(layer.pool, "pool"),
        factors.gate_mode,
        call.precision,
        nodes,
        depth,
        capacity,
        work,
        factors.qk_l2norm,
        tuple(_gate_dtype(gate, name) for name, gate in gates),
    )


def _gate_dtype(gate: torch.Tensor | None, name: str) -> str:
    return "none" if gate is None else _GATE_SHORT.get(gate.dtype) or short_dtype(gate, name)


def _pointers(layer: CommitLayer) -> tuple[torch.Tensor | None, ...]:
    factors, pending = layer.factors, layer.factors.pending
    layout = gate_layout(factors.spec.name, factors.gate_mode)
    chain = () if pending is None else chain_tensors(layout, pending)
    return (layer.pool, factors.k, factors.v, *[factors.gates.get(name) for name in layout.tensors], *chain)


def _shape_arguments(call: CommitCall, layer: CommitLayer) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Scalars and strides of a layer, before and after the sizes: layers that share them share a launch."""
    factors, packed = layer.factors, call.tree.is_packed
    layout, pending = gate_layout(factors.spec.name, factors.gate_mode), factors.pending
    before: tuple[Any, ...] = () if pending is None else chain_sizes(layout, pending)
    words = call.tree.ancestors.stride()
    after = (
        *option_values(layout, factors.beta_scale, factors.options),
        *rows_strides(factors.k, packed),
        *rows_strides(factors.v, packed),
        *gate_strides(layout, factors.gates, packed),
        *((0, words[0]) if packed else words[:2]),
        *layer.pool.stride()[:3],
    )
    return before, (layer.pool.shape[0], *after)


def _check_reach(call: CommitCall, layer: CommitLayer) -> None:
    k, v, pool, nodes = layer.factors.k, layer.factors.v, layer.pool, call.tree.max_nodes
    rows, heads = max(k.stride(-3), v.stride(-3)) * nodes, max(k.stride(-2), v.stride(-2)) * v.shape[-2]
    if rows > REACH or heads > REACH or pool.stride(2) * pool.shape[2] > REACH:
        check_reach("factors.k", k, nodes)
        check_reach("factors.v", v, nodes)
        check_reach("pool", pool.transpose(1, 2), pool.shape[2])


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


#: Tables that a captured graph reads whenever it is replayed, which nobody tells us the end of.
_captured: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}


def _layer_table(pointers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Pointers of all layers in device memory. A table seen by a captured graph is kept for good."""
    table = _made_table(pointers, device)
    if _capturing(device):
        _captured[pointers, device] = table
    return table


@functools.lru_cache(maxsize=256)
def _made_table(pointers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    if _capturing(device):
        raise RuntimeError(
            "commit: these layers have not been committed together before; call commit (or warmup) once with the same "
            "tensors before capturing a CUDA graph"
        )
    return torch.tensor(pointers, dtype=torch.int64).to(device)


@dataclass(slots=True, eq=False)
class _Launch:
    """One kernel launch of a commit, with everything but what may differ from round to round."""

    kernel: LoadedKernel
    grid: tuple[int, ...]
    leading: tuple[Any, ...]
    trailing: tuple[Any, ...]
    pending: bool


class PreparedCommit:
    """A commit whose launches are worked out: pools, factors, tree and sizes are fixed, the tensors of a call are not.

    It keeps the table of its layers alive. A captured graph reads that table at every replay, so it must not outlive
    this object.
    """

    __slots__ = ("_launches",)

    def __init__(self, launches: list[_Launch]) -> None:
        self._launches = launches

    @property
    def launches(self) -> int:
        """Kernel launches of a call: one a geometry."""
        return len(self._launches)

    def __call__(self, slots: torch.Tensor, accepted: torch.Tensor, actions: torch.Tensor | None = None) -> None:
        """Enqueue the launches; no host synchronisation. The tensors are of the prepared batch, contiguous."""
        for launch in self._launches:
            changing = (slots, accepted, actions) if launch.pending else (slots, accepted)
            launch.kernel.launch(launch.grid, (*launch.leading, *changing, *launch.trailing))


def _prepare_group(call: CommitCall, problem: Problem, layers: list[CommitLayer]) -> _Launch:
    config, kernels = choose(problem, layers[0].pool.device, call.variant)
    batch, heads = call.slots.shape[0], layers[0].factors.v.shape[-2]
    before, (slot_count, *after) = _shape_arguments(call, layers[0])
    tensors = [_pointers(layer) for layer in layers]
    if len(layers) == 1:
        leading: tuple[Any, ...] = tensors[0]
    else:
        pointers = tuple(0 if t is None else t.data_ptr() for row in tensors for t in row)
        leading = (_layer_table(pointers, layers[0].pool.device),)
    nodes = call.tree.max_nodes if call.tree.is_packed else layers[0].factors.k.shape[1]
    trailing = (call.tree.ancestors, call.tree.offsets, *before, nodes, heads, slot_count, batch, *after)
    which = 0 if len(layers) == 1 else 1
    grid = get_variant("commit", config.variant).grids(problem, config, batch * len(layers), heads)[which]
    return _Launch(kernels[which], grid, leading, trailing, problem.pending > 0)


def prepare_commit(call: CommitCall) -> PreparedCommit:
    """Work out the launches of a commit: one a geometry."""
    if call.slots.shape[0] == 0:
        return PreparedCommit([])
    groups: dict[Any, list[CommitLayer]] = {}
    for layer in call.layers:
        _check_reach(call, layer)
        problem = commit_problem(call, layer)
        heads = layer.factors.v.shape[-2]
        aligned = all(t is None or t.data_ptr() % 16 == 0 for t in _pointers(layer))
        # The table kernel assumes 16-byte pointers; a layer without them is launched alone.
        alone = 0 if aligned else id(layer)
        groups.setdefault((problem, heads, _shape_arguments(call, layer), alone), []).append(layer)
    return PreparedCommit([_prepare_group(call, problem, layers) for (problem, *_), layers in groups.items()])


def commit(call: CommitCall) -> None:
    """Fold accepted paths into the pools, in place; one launch a geometry, no host synchronisation."""
    prepare_commit(call)(call.slots, call.accepted, call.actions)
