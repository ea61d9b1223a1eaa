"""Convolutions along trees and their commits with generated kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch

from bole_runtime.backends.triton_backend.commit import _layer_table
from bole_runtime.backends.triton_backend.reach import REACH
from bole_runtime.backends.triton_backend.select import SHORT, buckets, choose, short_dtype
from bole_runtime.conv.calls import ConvCall, ConvCommitCall, ConvCommitLayer
from bole_runtime.conv.factors import ConvPending
from bole_runtime.kernels.conv_problem import ConvProblem
from bole_runtime.kernels.loader import LoadedKernel
from bole_runtime.kernels.variants import get_variant
from bole_runtime.kernels.variants.conv import grid

#: Kernel, grid, and the arguments before and after the slots and the accepted nodes.
_Launch = tuple[LoadedKernel, tuple[int, ...], tuple[Any, ...], tuple[Any, ...]]


@functools.lru_cache(maxsize=4096)
def _problem(
    op: str, channels: int, width: int, length: int, in_dtype: str, state_dtype: str, bias: bool, silu: bool,
    dynamic: bool, nodes: int, pending: int, batch: int,
) -> ConvProblem:  # fmt: skip
    node_bucket, _, pending_bucket, work = buckets(op, nodes, nodes, pending, batch, 1)
    wide = 1 << (channels - 1).bit_length()
    return ConvProblem(
        op, wide, width, length, in_dtype, state_dtype, bias, silu, dynamic, node_bucket, pending_bucket, work
    )


def _name(tensor: torch.Tensor, argument: str) -> str:
    return SHORT.get(tensor.dtype) or short_dtype(tensor, argument)


def conv_problem(call: ConvCall) -> ConvProblem:
    """Return what the kernel of a convolution is specialised for."""
    return _problem(
        "tree_conv", call.x.shape[-1], call.width, call.state.shape[2], _name(call.x, "x"),
        _name(call.state, "state"), call.bias is not None, call.silu, call.dynamic, call.tree.max_nodes,
        0 if call.pending is None else call.pending.capacity, call.slots.shape[0],
    )  # fmt: skip


def commit_problem(call: ConvCommitCall, layer: ConvCommitLayer) -> ConvProblem:
    """Return what the kernels of a layer's commit are specialised for."""
    factors, pool = layer.factors, layer.pool
    return _problem(
        "conv_commit", factors.x.shape[-1], factors.width, pool.shape[2], _name(factors.x, "factors.x"),
        _name(pool, "pools"), False, False, False, call.tree.max_nodes,
        0 if factors.pending is None else factors.pending.capacity, call.slots.shape[0],
    )  # fmt: skip


def _check_reach(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose last two dimensions span more than a 32-bit offset tells."""
    shape, stride = tensor.shape, tensor.stride()
    if (shape[-2] - 1) * stride[-2] + (shape[-1] - 1) * stride[-1] > REACH:
        raise ValueError(
            f"{name}: strides {stride} reach beyond the {REACH} elements that the kernels address from one row; give a "
            f"copy ({name}.contiguous()), or set BOLE_BACKEND=torch"
        )


def _rows(tensor: torch.Tensor, packed: bool) -> tuple[int, int]:
    """Strides over requests and nodes; a packed tensor has stride 0 over requests."""
    stride = tensor.stride()
    return (0, stride[0]) if packed else (stride[0], stride[1])


def _ring(pending: ConvPending | None) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    if pending is None:
        return (), ()
    return (pending.x, pending.length, pending.start), (pending.capacity, *pending.x.stride()[:2])


def tree_conv(call: ConvCall) -> None:
    """Fill ``call.out``, and the capture buffer if there is one; no host synchronisation."""
    x, tree, packed = call.x, call.tree, call.tree.is_packed
    batch = call.slots.shape[0]
    if batch == 0:
        return
    _check_reach("state", call.state)
    _check_reach("weight", call.weight)
    problem = conv_problem(call)
    config, (kernel,) = choose(problem, x.device, call.variant)
    ring, ring_scalars = _ring(call.pending)
    weight = call.weight.stride()
    bias: tuple[torch.Tensor, ...] = () if call.bias is None else (call.bias,)
    capture = None if call.capture is None else call.capture.x
    args: tuple[Any, ...] = (
        x, call.weight, *bias, call.state, call.slots, tree.parents, tree.depths, tree.offsets, call.out, capture,
        *ring, *ring_scalars, tree.max_nodes, -(-tree.max_nodes // config["nb"]), x.shape[-1], call.state.shape[0],
        *_rows(x, packed),
        *((*_rows(call.weight, packed), *weight[-2:]) if call.dynamic else weight),
        *(b.stride()[0] for b in bias), *call.state.stride(), *_rows(call.out, packed),
        *((0, 0) if capture is None else _rows(capture, packed)), 0 if packed else tree.max_nodes,
    )  # fmt: skip
    kernel.launch(grid(config, tree.max_nodes, batch, x.shape[-1]), args)


def _pointers(layer: ConvCommitLayer) -> tuple[torch.Tensor, ...]:
    return (layer.pool, layer.factors.x, *_ring(layer.factors.pending)[0])


def _shape_arguments(call: ConvCommitCall, layer: ConvCommitLayer) -> tuple[int, ...]:
    """Sizes and strides of a layer: layers that share them share a launch."""
    tree, x, pool = call.tree, layer.factors.x, layer.pool
    return (
        *_ring(layer.factors.pending)[1], tree.max_nodes, x.shape[-1], pool.shape[0], call.slots.shape[0],
        *_rows(x, tree.is_packed), *pool.stride(), 0 if tree.is_packed else tree.max_nodes,
    )  # fmt: skip


class PreparedConvCommit:
    """A commit whose launches are worked out: pools, factors and tree are fixed, slots and accepted nodes are not.

    It keeps the tables of its layers alive.
    """

    __slots__ = ("_launches",)

    def __init__(self, launches: list[_Launch]) -> None:
        self._launches = launches

    @property
    def launches(self) -> int:
        """Kernel launches of a call: one a geometry."""
        return len(self._launches)

    def __call__(self, slots: torch.Tensor, accepted: torch.Tensor) -> None:
        """Enqueue the launches; no host synchronisation."""
        for kernel, blocks, leading, trailing in self._launches:
            kernel.launch(blocks, (*leading, slots, accepted, *trailing))


def prepare_conv_commit(call: ConvCommitCall) -> PreparedConvCommit:
    """Work out the launches of a commit: one a geometry."""
    if call.slots.shape[0] == 0:
        return PreparedConvCommit([])
    groups: dict[Any, list[ConvCommitLayer]] = {}
    for layer in call.layers:
        _check_reach("pools", layer.pool)
        aligned = all(t.data_ptr() % 16 == 0 for t in _pointers(layer))
        # The table kernel assumes 16-byte pointers; a layer without them is launched alone.
        alone = 0 if aligned else id(layer)
        groups.setdefault((commit_problem(call, layer), _shape_arguments(call, layer), alone), []).append(layer)
    return PreparedConvCommit(
        [_prepare_group(call, problem, shape, layers) for (problem, shape, _), layers in groups.items()]
    )


def conv_commit(call: ConvCommitCall) -> None:
    """Advance the pools in place; one launch a geometry, no host synchronisation."""
    prepare_conv_commit(call)(call.slots, call.accepted)


def _prepare_group(
    call: ConvCommitCall, problem: ConvProblem, shape: tuple[int, ...], layers: list[ConvCommitLayer]
) -> _Launch:
    device = layers[0].pool.device
    config, kernels = choose(problem, device, call.variant)
    tensors = [_pointers(layer) for layer in layers]
    leading: tuple[Any, ...] = tensors[0]
    if len(layers) > 1:
        leading = (_layer_table(tuple(t.data_ptr() for row in tensors for t in row), device),)
    tree = call.tree
    trailing = (tree.parents, tree.depths, tree.offsets, *shape)
    which = 0 if len(layers) == 1 else 1
    rows = call.slots.shape[0] * len(layers)
    made = get_variant("conv_commit", config.variant).grids(problem, config, rows, layers[0].factors.x.shape[-1])
    return kernels[which], made[which], leading, trailing
