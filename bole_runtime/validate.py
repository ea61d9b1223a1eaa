"""Checks of the arguments of ``verify`` and ``commit``: straight-line code, messages built only when a check fails.

Every check reads host metadata. Index values are read by :mod:`bole_runtime.validate_values`, for CPU tensors or on
request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeVar

import torch

from bole_runtime.factors import NO_OPTIONS
from bole_runtime.families import InputSpec, RecurrenceSpec
from bole_runtime.families.spec import DATA_DTYPES
from bole_runtime.tree import TreeBatch
from bole_runtime.tree.check import INDEX_DTYPES, check_dense

PRECISIONS = ("fast", "lossless")
_T = TypeVar("_T")


def not_a(name: str, value: object, expected: str) -> NoReturn:
    """Raise the TypeError for an argument of a wrong Python type."""
    raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")


def as_tuple(name: str, value: Sequence[_T], one: str) -> tuple[_T, ...]:
    """Return a list or tuple of layers as a tuple.

    Raises:
        TypeError: neither a list nor a tuple.
    """
    if not isinstance(value, (list, tuple)):
        not_a(name, value, f"{one}, or a list or tuple with one a layer")
    return tuple(value)


def wrong_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...], meaning: str) -> NoReturn:
    """Raise the ValueError for a wrong shape, or the TypeError for a tensor that has none."""
    check_dense(name, tensor)
    raise ValueError(f"{name}: expected shape {tuple(expected)} ({meaning}), got {tuple(tensor.shape)}")


def check_tensor(name: str, tensor: object, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    """Return ``tensor`` if it is a dense tensor of an allowed dtype on ``device``.

    Raises:
        TypeError: not a tensor, a dtype outside ``dtypes``, or sparse or nested.
        ValueError: on another device.
    """
    if not isinstance(tensor, torch.Tensor):
        not_a(name, tensor, "a torch.Tensor")
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(d) for d in dtypes)
        raise TypeError(f"{name}: dtype {tensor.dtype} is not allowed; allowed: {allowed}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        check_dense(name, tensor)
    if tensor.device != device:
        raise ValueError(f"{name}: on {tensor.device}, but the tree is on {device}; all tensors must share a device")
    return tensor


def check_last_stride(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose last dimension is not contiguous.

    Raises:
        TypeError: it has no strides.
        ValueError: the last stride is not 1.
    """
    check_dense(name, tensor)
    if tensor.stride()[-1] != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name}: the last dimension must be contiguous (stride 1), got stride {tensor.stride()[-1]}")


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tree: TreeBatch, backend: str) -> tuple[int, int, int]:
    """Check q, k and v against each other and against the capacity of the tree; return HV, dv and dk.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device, shape, head count or stride.
    """
    device, lead = tree.device, tree.lead
    # One test for the usual case; the calls below it find out what is wrong.
    if not (
        isinstance(q, torch.Tensor)
        and isinstance(k, torch.Tensor)
        and isinstance(v, torch.Tensor)
        and q.dtype in DATA_DTYPES
        and k.dtype is q.dtype is v.dtype
        and q.device == device == k.device
        and v.device == device
    ):
        check_tensor("q", q, device, DATA_DTYPES)
        check_tensor("k", k, device, (q.dtype,))
        check_tensor("v", v, device, (q.dtype,))
    if q.dtype is torch.float64 and backend == "triton":
        raise TypeError("q: dtype torch.float64 is served by the torch and reference backends only")
    try:
        qs, ks, vs = q.shape, k.shape, v.shape
        ends = (*q.stride()[-1:], *k.stride()[-1:], *v.stride()[-1:])
    except RuntimeError:  # One has no shape or no strides.
        for name, t in (("q", q), ("k", k), ("v", v)):
            check_dense(name, t)
        raise
    dims = len(lead) + 2
    if len(qs) != dims:
        layout = "packed [T, HK, dk]" if dims == 3 else "dense [B, N, HK, dk]"
        raise ValueError(f"q: expected {layout} because the tree is {layout.split()[0]}, got shape {tuple(qs)}")
    key_heads, dk = qs[-2], qs[-1]
    if qs != (*lead, key_heads, dk):
        wrong_shape("q", q, (*lead, key_heads, dk), "the capacity of the tree, then HK, dk")
    if ks != qs:
        wrong_shape("k", k, qs, "the shape of q")
    if len(vs) != dims or vs != (*lead, vs[-2], vs[-1]):
        wrong_shape("v", v, (*lead, *vs[-2:]), "the capacity of the tree, then HV, dv")
    heads, dv = vs[-2], vs[-1]
    if dk == 0 or key_heads == 0:
        raise ValueError(f"q: HK and dk must be at least 1, got shape {tuple(qs)}")
    if dv == 0 or heads == 0 or heads % key_heads:
        raise ValueError(f"v: HV = {heads} must be a positive multiple of HK = {key_heads}, and dv = {dv} at least 1")
    if ends != (1, 1, 1):
        check_last_stride("q", q)
        check_last_stride("k", k)
        check_last_stride("v", v)
    return heads, dv, dk


def check_state(
    name: str, state: torch.Tensor, device: torch.device, heads: int, dv: int, dk: int, backend: str
) -> None:
    """Check a state pool.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device, shape or stride.
    """
    check_tensor(name, state, device, DATA_DTYPES)
    shape = state.shape
    slots = shape[0] if shape else 0
    if shape != (slots, heads, dv, dk):
        wrong_shape(name, state, (slots, heads, dv, dk), "slots, HV, dv, dk; a [dk, dv] state must be transposed first")
    if state.stride()[-1] != 1 and dk > 1:
        raise ValueError(f"{name}: dk, the last dimension, must be contiguous (stride 1), got strides {state.stride()}")
    if state.dtype is torch.float64 and backend == "triton":
        raise TypeError(f"{name}: dtype torch.float64 is served by the torch and reference backends only")


def check_index(name: str, index: torch.Tensor, device: torch.device, batch: int) -> torch.Tensor:
    """Check slots or accepted nodes, and return them contiguous.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device or shape.
    """
    check_tensor(name, index, device, INDEX_DTYPES)
    if index.shape != (batch,):
        wrong_shape(name, index, (batch,), "one entry a request of the tree")
    return index if index.is_contiguous() else index.contiguous()


def gate_mode_of(spec: RecurrenceSpec, gates: Mapping[str, object]) -> str:
    """Return the gate mode that the names in ``gates`` belong to.

    Raises:
        TypeError: ``gates`` is not a mapping.
        ValueError: a name is missing or unexpected.
    """
    if type(gates) is not dict and not isinstance(gates, Mapping):  # The second test takes a microsecond.
        not_a("gates", gates, "a mapping from gate names to tensors")
    found = spec.mode_of(gates)
    if found is not None:
        return found
    modes = "; ".join(f"{m}: {', '.join(i.name for i in spec.gates(m)) or 'none'}" for m in spec.modes)
    best = max(spec.modes, key=lambda m: len(spec.allowed[m] & gates.keys()))
    missing = sorted(spec.required[best] - gates.keys())
    unexpected = sorted(str(n) for n in gates.keys() - spec.allowed[best])
    faults = [
        f"{word} {', '.join(names)}" for word, names in (("missing", missing), ("unexpected", unexpected)) if names
    ]
    raise ValueError(f"gates: {' and '.join(faults)} for mode {best!r} of {spec.name!r}; allowed are {modes}")


def check_gates(
    spec: RecurrenceSpec, mode: str, gates: Mapping[str, torch.Tensor | float], lead: tuple[int, ...],
    heads: tuple[int, int], dims: tuple[int, int], device: torch.device,
) -> tuple[dict[str, torch.Tensor], float, Mapping[str, float]]:  # fmt: skip
    """Check the gates of a mode; return the tensors among them, beta_scale, and the other floats.

    Args:
        spec: the family.
        mode: one of its gate modes, whose names ``gates`` has.
        gates: as given.
        lead: leading dimensions of the tree.
        heads: HK and HV.
        dims: dk and dv.
        device: the tree's.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device, shape or stride.
    """
    tensors: dict[str, torch.Tensor] = {}
    expected: tuple[int, ...]
    scalar = (*lead, heads[1])
    for i in spec.node_gates(mode):
        t = gates[i.name]
        if not isinstance(t, torch.Tensor) or t.dtype not in i.dtypes or t.device != device:
            check_tensor(f"gates[{i.name!r}]", t, device, i.dtypes)
        assert isinstance(t, torch.Tensor)
        expected = scalar if i.scalar else (*lead, *i.sizes(heads, dims))
        try:
            if t.shape != expected:
                wrong_shape(f"gates[{i.name!r}]", t, expected, meaning(i))
            if t.stride()[-1] != 1:
                check_last_stride(f"gates[{i.name!r}]", t)
        except RuntimeError:
            check_dense(f"gates[{i.name!r}]", t)
            raise
        tensors[i.name] = t
    for i in spec.parameters(mode):
        if i.default is not None and i.name not in gates:
            continue
        t = check_tensor(f"gates[{i.name!r}]", gates[i.name], device, i.dtypes)
        expected = heads[1:] if i.per_head else i.sizes(heads, dims)
        if t.shape != expected:
            wrong_shape(f"gates[{i.name!r}]", t, expected, meaning(i))
        check_last_stride(f"gates[{i.name!r}]", t)
        tensors[i.name] = t
    beta_scale, floats = 1.0, NO_OPTIONS
    for i in spec.options(mode):
        number = check_option(i, gates.get(i.name, i.default))
        if i.name == "beta_scale":
            beta_scale = number
        else:
            floats = {**floats, i.name: number}
    return tensors, beta_scale, floats


def meaning(i: InputSpec) -> str:
    """Return what the dimensions of an input stand for, for messages."""
    what = "one value" if len([d for d in i.shape if d != "node"]) == 1 else f"a vector of {i.shape[-1]}"
    head = "key head" if "HK" in i.shape else "value head"
    return f"{what} a node and {head}" if i.shape[0] == "node" else f"{what} a {head}"


def check_variant(variant: object, op: str | None = None) -> None:
    """Check a pinned configuration, on every backend: only one reads it, but all must refuse the same.

    Raises:
        TypeError: not a Config, such as the bare name of a variant.
        ValueError: of a variant that ``op`` does not have.
    """
    from bole_runtime.kernels.space import Config

    if not isinstance(variant, Config):
        not_a("variant", variant, "a Config (get_variant(op, name).config({...}) makes one) or None")
    if op is not None:
        from bole_runtime.kernels.variants import get_variant

        try:
            get_variant(op, variant.variant)
        except ValueError as error:
            raise ValueError(f"variant: {error}") from None


def check_option(i: InputSpec, value: object, name: str | None = None) -> float:
    """Return a float that a gate mode takes: within its limits, and finite unless infinity is its default.

    Args:
        i: its declaration.
        value: as given.
        name: for messages; default, a gate of the call.

    Raises:
        TypeError: not an int or float.
        ValueError: not finite, or outside the limits.
    """
    if isinstance(value, float) and value == i.default:
        return value
    name = name or f"gates[{i.name!r}]"
    number = check_number(name, value)
    low, high = i.limits
    if not low <= number <= high:
        raise ValueError(f"{name}: {number} is not allowed; allowed: {low} to {high}")
    return number


def check_number(name: str, value: object) -> float:
    """Return a finite float.

    Raises:
        TypeError: not an int or float.
        ValueError: not finite.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        not_a(name, value, "a Python float")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if number - number != 0.0:
        raise ValueError(f"{name}: {number} is not finite")
    return number
