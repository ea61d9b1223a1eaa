"""Checks of tree arguments, and the message for an invalid tree."""

from __future__ import annotations

import torch

INDEX_DTYPES = (torch.int32, torch.int64)


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Refuse what has no strides, such as sparse tensors, or no shape, such as nested ones: no kernel can read it.

    Raises:
        TypeError: another layout than torch.strided, or nested.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        nested = "nested, " if tensor.is_nested else ""
        raise TypeError(f"{name}: expected a dense tensor (torch.strided, not nested), got {nested}{tensor.layout}")


def checks_values(validate: object, device: torch.device) -> bool:
    """Return whether a call looks at values: as asked, by default on the CPU only, where it costs no sync.

    Raises:
        TypeError: neither a bool nor None.
    """
    if validate is not None and not isinstance(validate, bool):
        raise TypeError(f"validate: expected a bool or None, got {type(validate).__name__}")
    return device.type == "cpu" if validate is None else validate


def check_index_tensor(name: str, tensor: object, dims: int) -> torch.Tensor:
    """Return ``tensor`` if it is an int32 or int64 tensor of ``dims`` dimensions.

    Raises:
        TypeError: not a tensor, another dtype, or not dense.
        ValueError: another number of dimensions.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name}: dtype {tensor.dtype} is not allowed; allowed: torch.int32, torch.int64")
    check_dense(name, tensor)
    if tensor.dim() != dims:
        raise ValueError(f"{name}: expected {dims} dimension(s), got shape {tuple(tensor.shape)}")
    return tensor


def check_capacity(name: str, value: object, low: int, high: int) -> int:
    """Return a host capacity after a range check.

    Raises:
        TypeError: not an int.
        ValueError: outside [low, high].
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name}: {value} is not allowed; allowed: {low} to {high}")
    return value


def explain_fault(
    parents: torch.Tensor, starts: list[int] | None, counts: list[int], max_nodes: int, max_depth: int, max_total: int
) -> str:
    """Describe the first fault of a tree that did not build. Host code.

    Args:
        parents: int [B, N], request-local.
        starts: first row of each request of a packed tree.
        counts: nodes of each request, possibly above ``max_nodes`` or negative.
        max_nodes: capacity.
        max_depth: capacity.
        max_total: capacity.
    """
    for b, (row, count) in enumerate(zip(parents.tolist(), counts, strict=True)):
        if starts is not None and (starts[b] < 0 or starts[b] + count > max_total):
            return f"offsets: request {b} owns rows {starts[b]} to {starts[b] + count}, outside 0 to {max_total}"
        if count < 0:
            return f"offsets: request {b} ends before it starts"
        if count > max_nodes:
            return f"offsets: request {b} has {count} nodes, above max_nodes = {max_nodes}"
        depth: list[int] = []
        for i in range(count):
            p = row[i]
            where = f"parents: node {i} of request {b} has parent {p}"
            if p == -2:
                depth.append(-1)
                continue
            if p < -2 or p >= count:
                return f"{where}; allowed: -1 (root), -2 (padding), or a node below {i}"
            if p >= i:
                return f"{where}; a parent must come before its child (topological order, no cycles)"
            if p >= 0 and depth[p] < 0:
                return f"{where}, which is a padding node"
            depth.append(depth[p] + 1 if p >= 0 else 0)
            if depth[i] > max_depth:
                return f"{where} and {depth[i]} strict ancestors, above max_depth = {max_depth}"
    return "parents: the tree is invalid"
