"""The two operations on short causal convolutions: run one along the paths of proposal trees, commit its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from bole_runtime import validate as check
from bole_runtime import validate_buffers as buffers
from bole_runtime import validate_values as values
from bole_runtime.backend_choice import backend_name
from bole_runtime.conv import checks
from bole_runtime.conv.calls import ConvCall, ConvCommitCall, ConvCommitLayer
from bole_runtime.conv.factors import ConvFactors, ConvPending
from bole_runtime.tree import TreeBatch
from bole_runtime.tree.check import checks_values

if TYPE_CHECKING:
    from bole_runtime.kernels.space import Config

#: Name to module. A module has ``tree_conv(call)``, which fills ``call.out``, and ``conv_commit(call)``, which updates
#: the pools.
BACKENDS: dict[str, str] = {
    "triton": "bole_runtime.conv.triton_backend",
    "torch": "bole_runtime.conv.torch_backend",
    "reference": "bole_runtime.conv.reference",
}


_loaded: dict[str, Any] = {}


def _backend(name: str) -> Any:
    module = _loaded.get(name)
    if module is None:
        module = _loaded[name] = import_module(BACKENDS[name])
    return module


def tree_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    state: torch.Tensor,
    slots: torch.Tensor,
    tree: TreeBatch,
    activation: str | None = "silu",
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    factors: ConvFactors | None = None,
    pending: ConvPending | None = None,
    variant: Config | None = None,
    validate: bool | None = None,
) -> tuple[torch.Tensor, ConvFactors]:
    """Run a depthwise causal convolution along the path from the root to every node, all nodes at once.

    The inputs before a node are those of its ancestors, then the pending inputs, then the committed state: every path
    gives what a token-by-token ``causal_conv1d_update`` along it would. Sums, bias and SiLU are fp32, the output is
    rounded once. Nothing is written but ``out`` and ``factors``. No host sync on a device, so a CUDA graph can hold
    the call.

    Args:
        x: inputs before the convolution, [B, N, C] for a dense tree or [T, C] for a packed one, of the tree's
            capacity; bf16, fp16 or fp32 (fp64 on the torch and reference backends). Any outer strides, channels
            contiguous: a range of columns of a packed projection will do, such as the v part alone.
        weight: [C, W], W from 2 to 8, oldest tap first (``conv1d.weight.squeeze(1)``); any strides. Or one a node,
            [B, N, C, W] or [T, C, W], for convolutions whose weights depend on the token.
        bias: [C] or None.
        state: pool of the last raw inputs, [slots, C, L] with L >= W - 1, oldest first (the layout of causal_conv1d);
            any strides; fp32, bf16 or fp16.
        slots: int32 or int64 [B], the pool row of each request; -1 marks a padding row: nothing is read, its output
            is zero. The same slot may serve several requests.
        tree: topology and capacities. Padding nodes have output zero; packed rows that no request owns are unspecified.
        activation: ``silu`` (or its other name, ``swish``), or None.
        out: where to write, the shape of x; with memory of its own. Default: a new tensor.
        out_dtype: dtype of the output; default, that of ``out`` or of x.
        factors: buffer from :meth:`ConvFactors.allocate` to copy x to, with memory of its own. Default: the factors
            alias x, which must then stay unchanged until the commit.
        pending: accepted tokens whose inputs are not in the state yet.
        variant: pin a kernel configuration instead of the default.
        validate: check index values and the tree's status (a host sync on a device). Default: only for CPU tensors.

    Returns:
        The output, and the factors that :func:`conv_commit` needs.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: a wrong shape, device, stride, name or value. Nothing has run.

    Example:
        >>> tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 1]]))
        >>> x, weight = torch.randn(1, 4, 8), torch.randn(8, 4)
        >>> pool, slots = torch.zeros(3, 8, 3), torch.tensor([1])
        >>> out, factors = tree_conv(x, weight, state=pool, slots=slots, tree=tree)
        >>> conv_commit(pool, slots, factors, torch.tensor([3]))  # pool[1] now ends with the inputs of 0, 1 and 3
    """
    if not isinstance(tree, TreeBatch):
        check.not_a("tree", tree, "a TreeBatch")
    backend = backend_name(tree.device)
    channels = checks.check_x(x, tree, backend)
    width = checks.check_weight(weight, bias, x, backend)
    checks.check_pool("state", state, tree.device, channels, width, backend)
    slots = check.check_index("slots", slots, tree.device, tree.max_batch)
    silu = checks.check_activation(activation)
    if out_dtype is not None:
        checks.check_out_dtype(out_dtype)
    if pending is not None:
        checks.check_pending(pending, x, state.shape[0])
    if factors is not None:
        checks.check_capture(factors, x, width)
    if variant is not None:
        check.check_variant(variant)
    if out is not None:
        buffers.check_out(out, x, out_dtype)
    checks.check_memory(out, None if factors is None else factors.x, (x, weight, state, slots), bias, pending)
    if out is None:
        out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    if backend == "triton" and out.dtype is torch.float64:
        raise TypeError("out: dtype torch.float64 is served by the torch and reference backends only")
    if checks_values(validate, tree.device):
        values.check_status(tree)
        values.check_slots(slots, state.shape[0])
        if pending is not None:
            values.check_pending_values(pending, slots)
    if out.numel():
        _backend(backend).tree_conv(ConvCall(x, weight, bias, state, slots, tree, silu, out, pending, factors, variant))
    return out, ConvFactors(x if factors is None else factors.x, width, tree, pending)


def prepare_conv_commit(
    pools: torch.Tensor | Sequence[torch.Tensor],
    factors: ConvFactors | Sequence[ConvFactors],
    *,
    variant: Config | None = None,
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Do the host's work of a commit once, for rounds that differ in slots and accepted nodes only.

    Args:
        pools: as for :func:`conv_commit`.
        factors: as for :func:`conv_commit`. Their tensors, such as buffers from :meth:`ConvFactors.allocate`, and their
            tree are read at every call.
        variant: pin a kernel configuration instead of the default.

    Returns:
        A function of contiguous slots and accepted nodes, int32 or int64 [B] on the device of the tree, which enqueues
        one launch a geometry. It checks nothing and must outlive the CUDA graphs that hold it.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: a wrong shape, device, stride or value.
    """
    layers, tree, name = _layers(pools, factors, variant)
    backend = _backend(name)
    if name == "triton":
        none = torch.empty(tree.max_batch, dtype=torch.int32, device=tree.device)
        prepared: Callable[[torch.Tensor, torch.Tensor], None] = backend.prepare_conv_commit(
            ConvCommitCall(layers, none, none, tree, variant)
        )
        return prepared

    def run(slots: torch.Tensor, accepted: torch.Tensor) -> None:
        if tree.max_batch:
            backend.conv_commit(ConvCommitCall(layers, slots, accepted, tree, variant))

    return run


def _layers(
    pools: torch.Tensor | Sequence[torch.Tensor],
    factors: ConvFactors | Sequence[ConvFactors],
    variant: Config | None,
) -> tuple[tuple[ConvCommitLayer, ...], TreeBatch, str]:
    """Check what a commit does not get anew every round; return the layers, their tree and the backend's name."""
    each = (pools,) if isinstance(pools, torch.Tensor) else check.as_tuple("pools", pools, "a torch.Tensor")
    parts = (factors,) if isinstance(factors, ConvFactors) else check.as_tuple("factors", factors, "a ConvFactors")
    if len(each) != len(parts) or not each:
        raise ValueError(
            f"pools, factors: expected the same number of layers, at least one, got {len(each)} and {len(parts)}"
        )
    if not isinstance(parts[0], ConvFactors):
        check.not_a("factors", parts[0], "a ConvFactors or a sequence of them")
    tree = parts[0].tree
    if variant is not None:
        check.check_variant(variant)
    backend = backend_name(tree.device)
    return checks.check_layers(each, parts, backend), tree, backend


def conv_commit(
    pools: torch.Tensor | Sequence[torch.Tensor],
    slots: torch.Tensor,
    factors: ConvFactors | Sequence[ConvFactors],
    accepted: torch.Tensor,
    *,
    variant: Config | None = None,
    validate: bool | None = None,
) -> None:
    """Advance convolution states along the accepted paths, in place: the last inputs of state, pending and path.

    All layers of one geometry (channels, width, dtypes, strides) are one launch. Inputs are moved, not computed: a
    state of their dtype is exact. No host sync on a device. A pending chain is folded in as well; the caller then
    resets its length.

    Args:
        pools: [slots, C, L] with L >= W - 1, oldest input first, the pool that was read; or one a layer, each with
            memory of its own.
        slots: int32 or int64 [B]; -1 marks a padding row. A live slot may occur once.
        factors: of the convolution; or one a layer, all of the same tree.
        accepted: int32 or int64 [B], request-local index of the terminal node. -1: nothing happens to the row, its
            pending inputs included; its state stays bit-identical.
        variant: pin a kernel configuration instead of the default.
        validate: check index values (a host sync on a device). Default: only for CPU tensors. Without it, a row whose
            accepted node is no live node is left alone, and duplicated slots are undefined.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: a wrong shape, device, stride or value. Nothing has been written.
    """
    checked_conv_commit(pools, slots, factors, accepted, variant=variant, validate=validate)()


def checked_conv_commit(
    pools: torch.Tensor | Sequence[torch.Tensor],
    slots: torch.Tensor,
    factors: ConvFactors | Sequence[ConvFactors],
    accepted: torch.Tensor,
    *,
    variant: Config | None = None,
    validate: bool | None = None,
) -> Callable[[], None]:
    """Check the arguments of :func:`conv_commit` and return what does it."""
    layers, tree, backend = _layers(pools, factors, variant)
    slots = check.check_index("slots", slots, tree.device, tree.max_batch)
    accepted = check.check_index("accepted", accepted, tree.device, tree.max_batch)
    checks.check_index_apart(tuple(layer.pool for layer in layers), slots, accepted)
    if checks_values(validate, tree.device):
        values.check_status(tree)
        values.check_slots(slots, min(layer.pool.shape[0] for layer in layers))
        values.check_accepted(accepted, slots, tree)
        for layer in layers:
            if layer.factors.pending is not None:
                values.check_pending_values(layer.factors.pending, slots)

    def run() -> None:
        if tree.max_batch:
            _backend(backend).conv_commit(ConvCommitCall(layers, slots, accepted, tree, variant))

    return run


__all__ = ["conv_commit", "prepare_conv_commit", "tree_conv"]
