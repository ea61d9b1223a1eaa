"""Checks of the arguments of ``tree_conv`` and ``conv_commit``. They read host metadata only."""

from __future__ import annotations

import torch

from bole_runtime.conv.calls import ConvCommitLayer
from bole_runtime.conv.factors import ConvFactors, ConvPending
from bole_runtime.families.spec import DATA_DTYPES
from bole_runtime.kernels.conv_problem import MAX_STATE, WIDTHS
from bole_runtime.tree import TreeBatch
from bole_runtime.tree.check import check_dense
from bole_runtime.validate import check_last_stride, check_tensor, not_a, wrong_shape
from bole_runtime.validate_memory import refuse_overlaps

_USUAL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _check_dtype(name: str, tensor: torch.Tensor, backend: str) -> None:
    if tensor.dtype is torch.float64 and backend == "triton":
        raise TypeError(f"{name}: dtype torch.float64 is served by the torch and reference backends only")


def check_x(x: torch.Tensor, tree: TreeBatch, backend: str) -> int:
    """Check x against the capacity of the tree; return the number of channels.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device, shape or stride.
    """
    lead = tree.lead
    # One test for the usual case; the checks below it find out what is wrong.
    if (
        isinstance(x, torch.Tensor)
        and x.dtype in _USUAL_DTYPES
        and x.device == tree.device
        and not x.is_nested
        and x.layout is torch.strided
        and x.shape[:-1] == lead
        and x.shape[-1] > 0
        and x.stride()[-1] == 1
    ):
        return x.shape[-1]
    check_tensor("x", x, tree.device, DATA_DTYPES)
    _check_dtype("x", x, backend)
    if x.dim() != len(lead) + 1:
        layout = "packed [T, C]" if len(lead) == 1 else "dense [B, N, C]"
        raise ValueError(f"x: expected {layout} because the tree is {layout.split()[0]}, got shape {tuple(x.shape)}")
    channels = x.shape[-1]
    if x.shape[:-1] != lead:
        wrong_shape("x", x, (*lead, channels), "the capacity of the tree, then channels")
    if channels == 0:
        raise ValueError(f"x: there must be at least one channel, got shape {tuple(x.shape)}")
    check_last_stride("x", x)
    return channels


def check_weight(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, backend: str) -> int:
    """Check weight and bias; return the width.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device, shape or width.
    """
    check_tensor("weight", weight, x.device, DATA_DTYPES)
    _check_dtype("weight", weight, backend)
    channels = x.shape[-1]
    shape = tuple(weight.shape)
    width = shape[-1] if shape else 0
    if shape not in ((channels, width), (*x.shape, width)):
        raise ValueError(
            f"weight: expected ({channels}, W) (channels of x, taps; squeeze(1) a conv1d's), or one a node, "
            f"{(*x.shape, 'W')}, got {shape}"
        )
    if width not in WIDTHS:
        raise ValueError(f"weight: width {width} is not allowed; allowed: {WIDTHS[0]} to {WIDTHS[-1]} taps")
    if bias is not None:
        check_tensor("bias", bias, x.device, DATA_DTYPES)
        _check_dtype("bias", bias, backend)
        if bias.shape != (channels,):
            wrong_shape("bias", bias, (channels,), "one value a channel")
    return width


def check_pool(name: str, pool: torch.Tensor, device: torch.device, channels: int, width: int, backend: str) -> None:
    """Check a pool of convolution states.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device or shape.
    """
    check_tensor(name, pool, device, DATA_DTYPES)
    _check_dtype(name, pool, backend)
    if pool.dim() != 3 or pool.shape[1] != channels or not width - 1 <= pool.shape[2] <= MAX_STATE:
        raise ValueError(
            f"{name}: expected shape (slots, {channels}, L) with L from {width - 1} (width - 1) to {MAX_STATE}, "
            f"got {tuple(pool.shape)}; a [slots, L, C] pool is given as pool.transpose(1, 2)"
        )


def check_activation(activation: str | None) -> bool:
    """Return whether SiLU follows the convolution.

    Raises:
        TypeError: not a string.
        ValueError: another activation.
    """
    if activation is None:
        return False
    if not isinstance(activation, str):
        not_a("activation", activation, "a string or None")
    if activation not in ("silu", "swish"):
        raise ValueError(f"activation: {activation!r} is not allowed; allowed: 'silu', 'swish' (the same), None")
    return True


def check_out_dtype(out_dtype: torch.dtype) -> None:
    """Check the dtype asked for.

    Raises:
        TypeError: it is not allowed.
    """
    if out_dtype not in DATA_DTYPES:
        raise TypeError(f"out_dtype: {out_dtype!r} is not allowed; allowed: {', '.join(map(str, DATA_DTYPES))}")


def check_pending(pending: ConvPending, x: torch.Tensor, slots: int) -> None:
    """Check pending inputs against x and the slots of the pool.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device, shape or stride.
    """
    if not isinstance(pending, ConvPending):
        not_a("pending", pending, "a ConvPending or None")
    check_tensor("pending.x", pending.x, x.device, (x.dtype,))
    shape = tuple(pending.x.shape)
    if len(shape) != 3 or shape[0] != slots or shape[1] == 0 or shape[2] != x.shape[-1]:
        raise ValueError(
            f"pending.x: expected ({slots}, capacity, {x.shape[-1]}) (slots of the pool, at least one row, channels), "
            f"got {shape}"
        )
    check_last_stride("pending.x", pending.x)
    for name, t in (("pending.length", pending.length), ("pending.start", pending.start)):
        check_tensor(name, t, x.device, (torch.int32,))
        if t.shape != (slots,) or not t.is_contiguous():
            wrong_shape(name, t, (slots,), "one entry a slot, contiguous")


def check_capture(factors: ConvFactors, x: torch.Tensor, width: int) -> None:
    """Check a buffer given to ``tree_conv(factors=...)``.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device, shape, width or stride, or memory that x occupies.
    """
    if not isinstance(factors, ConvFactors):
        not_a("factors", factors, "a ConvFactors or None")
    check_tensor("factors.x", factors.x, x.device, (x.dtype,))
    if factors.x.shape != x.shape:
        wrong_shape("factors.x", factors.x, x.shape, "the shape of x")
    if factors.width != width:
        raise ValueError(f"factors: for width {factors.width}, but the weight has {width} taps")
    check_last_stride("factors.x", factors.x)
    if factors.x.numel() and factors.x.data_ptr() == x.data_ptr():
        raise ValueError("factors.x: is x itself; give no factors to let them alias x")


def check_layers(
    pools: tuple[torch.Tensor, ...], parts: tuple[ConvFactors, ...], backend: str
) -> tuple[ConvCommitLayer, ...]:
    """Check the pools and factors of a commit and pair them.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, device or stride, different trees, or a pool that is given twice.
    """
    tree = parts[0].tree
    layers: list[ConvCommitLayer] = []
    starts: set[int] = set()
    for n, (pool, part) in enumerate(zip(pools, parts, strict=True)):
        if not isinstance(part, ConvFactors):
            not_a(f"factors[{n}]", part, "a ConvFactors")
        if part.tree is not tree:
            raise ValueError(f"factors[{n}]: all layers of a commit must share the tree of factors[0]")
        check_dense(f"factors[{n}].x", part.x)
        if part.x.shape[:-1] != tree.lead:
            raise ValueError(f"factors[{n}]: x {tuple(part.x.shape)} is not of the tree's rows {tree.lead}")
        name = "pools" if len(pools) == 1 else f"pools[{n}]"
        check_pool(name, pool, tree.device, part.x.shape[-1], part.width, backend)
        if any(s == 0 and size > 1 for s, size in zip(pool.stride(), pool.shape, strict=True)):
            raise ValueError(f"{name}: expanded (stride 0), so rows share memory; a commit needs a row a slot")
        if part.pending is not None:
            check_pending(part.pending, part.x, pool.shape[0])
        starts.add(pool.data_ptr() if pool.shape[0] else -1 - n)
        layers.append(ConvCommitLayer(pool, part))
    if len(starts) != len(pools):
        raise ValueError("pools: two layers share a pool; every layer needs its own")
    read = [t for part in parts for t in _read_by(part)]

    def names() -> tuple[list[str], list[str]]:
        of_pools = ["pools"] if len(pools) == 1 else [f"pools[{n}]" for n in range(len(pools))]
        of_parts = [(f"factors[{n}]", part) for n, part in enumerate(parts)]
        return of_pools, [f"{name}.{field}" for name, part in of_parts for field in _FIELDS[: len(_read_by(part))]]

    refuse_overlaps(pools, read, names)
    return tuple(layers)


#: What a commit reads of a layer, the last three where there are pending inputs.
_FIELDS = ("x", "pending.x", "pending.length", "pending.start")


def _read_by(part: ConvFactors) -> tuple[torch.Tensor, ...]:
    if part.pending is None:
        return (part.x,)
    return part.x, part.pending.x, part.pending.length, part.pending.start


def check_index_apart(pools: tuple[torch.Tensor, ...], slots: torch.Tensor, accepted: torch.Tensor) -> None:
    """Check that a commit does not write over the slots and accepted nodes that it reads.

    Raises:
        ValueError: an overlap.
    """

    def names() -> tuple[list[str], list[str]]:
        of_pools = ["pools"] if len(pools) == 1 else [f"pools[{n}]" for n in range(len(pools))]
        return of_pools, ["slots", "accepted"]

    refuse_overlaps(pools, (slots, accepted), names)


def check_memory(
    out: torch.Tensor | None, capture: torch.Tensor | None,
    read: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None, pending: ConvPending | None,
) -> None:  # fmt: skip
    """Check that what a convolution writes shares no memory with itself or with what it reads.

    Args:
        out: of the caller, or None.
        capture: the buffer of factors, or None.
        read: x, weight, state and slots.
        bias: of the call, or None.
        pending: inputs above the roots, or None.

    Raises:
        ValueError: an overlap.
    """
    written = [(name, t) for name, t in (("out", out), ("factors.x", capture)) if t is not None]
    if not written:
        return
    everything: tuple[torch.Tensor, ...] = read if bias is None else (*read, bias)
    if pending is not None:
        everything = (*everything, pending.x, pending.length, pending.start)

    def names() -> tuple[list[str], list[str]]:
        of_read = ["x", "weight", "state", "slots", *(() if bias is None else ("bias",))]
        return [name for name, _ in written], [*of_read, *(() if pending is None else _FIELDS[1:])]

    refuse_overlaps([t for _, t in written], everything, names)
