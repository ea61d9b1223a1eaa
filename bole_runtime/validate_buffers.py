"""Checks of buffers: pending chains, capture buffers, outputs, and the layers of a commit."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.calls import CommitLayer
from bole_runtime.factors import Factors, PendingChain
from bole_runtime.families import RecurrenceSpec
from bole_runtime.families.spec import DATA_DTYPES
from bole_runtime.validate import check_last_stride, check_state, check_tensor, meaning, not_a, wrong_shape


def check_pending(
    spec: RecurrenceSpec, mode: str, pending: PendingChain, k: torch.Tensor, v: torch.Tensor, slots: int
) -> None:
    """Check a pending chain against the call's gate mode, k and v, and the slots of the pool.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device, shape, stride or gate name.
    """
    if not isinstance(pending, PendingChain):
        not_a("pending", pending, "a PendingChain or None")
    device = k.device
    check_tensor("pending.k", pending.k, device, (k.dtype,))
    check_tensor("pending.v", pending.v, device, (v.dtype,))
    if pending.k.dim() != 4:
        raise ValueError(f"pending.k: expected [slots, capacity, HK, dk], got shape {tuple(pending.k.shape)}")
    lead = (slots, pending.k.shape[1])
    if lead[1] == 0:
        raise ValueError("pending.k: the capacity, dimension 1, must be at least 1")
    if pending.k.shape != (*lead, *k.shape[-2:]):
        wrong_shape("pending.k", pending.k, (*lead, *k.shape[-2:]), "slots of the pool, capacity, HK, dk")
    if pending.v.shape != (*lead, *v.shape[-2:]):
        wrong_shape("pending.v", pending.v, (*lead, *v.shape[-2:]), "slots of the pool, capacity, HV, dv")
    check_last_stride("pending.k", pending.k)
    check_last_stride("pending.v", pending.v)
    kept = spec.kept_mode(mode)
    names = {i.name for i in spec.node_gates(kept)}
    if not isinstance(pending.gates, Mapping) or pending.gates.keys() != names:
        given = sorted(pending.gates) if isinstance(pending.gates, Mapping) else type(pending.gates).__name__
        why = "ready gates, whatever the call's gate mode" if spec.keeps_ready else f"of the call's gate mode {mode!r}"
        raise ValueError(f"pending.gates: expected exactly {sorted(names)} ({why}), got {given}")
    check_gate_buffers(spec, kept, "pending.gates", pending.gates, lead, k, v)
    for name, t in (("pending.length", pending.length), ("pending.start", pending.start)):
        check_tensor(name, t, device, (torch.int32,))
        if t.shape != (slots,) or not t.is_contiguous():
            wrong_shape(name, t, (slots,), "one entry a slot, contiguous")


def check_capture(
    spec: RecurrenceSpec, mode: str, factors: Factors, k: torch.Tensor, v: torch.Tensor,
    gates: Mapping[str, torch.Tensor],
) -> None:  # fmt: skip
    """Check buffers given to ``verify(factors=...)``.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device, shape, stride, family or gate mode.
    """
    if not isinstance(factors, Factors):
        not_a("factors", factors, "a Factors or None")
    kept = spec.kept_mode(mode)
    if factors.spec is not spec or factors.gate_mode != kept:
        how = "" if spec.keeps_ready else f"gate_mode={mode!r}"
        raise ValueError(
            f"factors: buffers of family {factors.spec.name!r} with {factors.gate_mode!r} gates, expected "
            f"{spec.name!r} with {kept!r} gates; make them with Factors.allocate({how})"
        )
    for name, t, like in (("factors.k", factors.k, k), ("factors.v", factors.v, v)):
        check_tensor(name, t, k.device, (like.dtype,))
        if t.shape != like.shape:
            wrong_shape(name, t, like.shape, "the shape of the input it captures")
        check_last_stride(name, t)
        if t.shape[-2] > 1 and t.stride(-2) != t.shape[-1]:
            raise ValueError(f"{name}: the heads of a node must be contiguous, got strides {t.stride()}")
    check_gate_buffers(spec, kept, "factors.gates", factors.gates, tuple(v.shape[:-2]), k, v)
    if not spec.keeps_ready:
        for i in spec.node_gates(kept):
            have, need = factors.gates[i.name].dtype, gates[i.name].dtype
            if torch.promote_types(have, need) is not have:
                raise TypeError(f"factors.gates[{i.name!r}]: {have} cannot hold the {need} of gates[{i.name!r}]")


def check_gate_buffers(
    spec: RecurrenceSpec, mode: str, name: str, gates: Mapping[str, torch.Tensor], lead: tuple[int, ...],
    k: torch.Tensor, v: torch.Tensor,
) -> None:  # fmt: skip
    """Check gates in buffers of Bole's own: a value's dimensions contiguous.

    Ready ones of families that keep ready gates are fp32 (fp64 for fp64 keys) and all of one layout.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device, shape or stride.
    """
    dtype = torch.float64 if k.dtype is torch.float64 else torch.float32
    heads, dims = (k.shape[-2], v.shape[-2]), (k.shape[-1], v.shape[-1])
    strides = {}
    for i in spec.node_gates(mode):
        t = check_tensor(f"{name}[{i.name!r}]", gates.get(i.name), k.device, (dtype,) if spec.keeps_ready else i.dtypes)
        expected = (*lead, *i.sizes(heads, dims))
        if t.shape != expected:
            wrong_shape(f"{name}[{i.name!r}]", t, expected, meaning(i))
        check_last_stride(f"{name}[{i.name!r}]", t)
        strides[i.name] = t.stride()[:-1]
    if spec.keeps_ready and len(set(strides.values())) > 1:
        raise ValueError(f"{name}: all must have the same strides, got {strides}")


def _extent(t: torch.Tensor) -> int:
    """Return the bytes from the first to past the last element."""
    if t.numel() == 0:
        return 0
    return (sum((n - 1) * abs(s) for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()


def check_out(
    out: torch.Tensor, v: torch.Tensor, out_dtype: torch.dtype | None, inputs: tuple[tuple[str, torch.Tensor], ...]
) -> None:
    """Check an output given by the caller: shape of v, and no memory shared with what is read.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device, shape or stride, or an overlap.
    """
    check_tensor("out", out, v.device, DATA_DTYPES if out_dtype is None else (out_dtype,))
    if out.shape != v.shape:
        wrong_shape("out", out, v.shape, "the shape of v")
    check_last_stride("out", out)
    if out.numel() and any(s == 0 and n > 1 for n, s in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"out: expanded (stride 0), so elements share memory; got strides {out.stride()}")
    low = out.data_ptr()
    high = low + _extent(out)
    for name, t in inputs:
        at = t.data_ptr()
        if at < high and (at >= low or at + _extent(t) > low) and t.numel() and out.numel():
            raise ValueError(f"out: overlaps {name} in memory; the output needs memory of its own")


def check_layers(pools: tuple[torch.Tensor, ...], parts: tuple[Factors, ...], backend: str) -> tuple[CommitLayer, ...]:
    """Check the pools and factors of a commit and pair them.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, device or stride, different trees or families, or a pool that is given twice.
    """
    first = parts[0]
    layers: list[CommitLayer] = []
    starts: set[int] = set()
    for n, (pool, part) in enumerate(zip(pools, parts, strict=True)):
        if not isinstance(part, Factors):
            not_a(f"factors[{n}]", part, "a Factors")
        if part.tree is not first.tree or part.spec is not first.spec:
            raise ValueError(f"factors[{n}]: all layers of a commit must share the tree and the family of factors[0]")
        k, v = part.k, part.v
        if k.shape[:-2] != first.tree.lead or v.shape[:-2] != first.tree.lead:
            raise ValueError(
                f"factors[{n}]: k {tuple(k.shape)} and v {tuple(v.shape)} are not of the tree's rows {first.tree.lead}"
            )
        sizes = (k.shape[-2], v.shape[-2]), (k.shape[-1], v.shape[-1])
        for gate in part.spec.node_gates(part.gate_mode):
            expected = tuple(v.shape[:-1]) if gate.scalar else (*v.shape[:-2], *gate.sizes(*sizes))
            if part.gates[gate.name].shape != expected:
                wrong_shape(f"factors[{n}].gates[{gate.name!r}]", part.gates[gate.name], expected, meaning(gate))
        name = "pool" if len(pools) == 1 else f"pool[{n}]"
        check_state(name, pool, k.device, v.shape[-2], v.shape[-1], k.shape[-1], backend)
        slots, heads, dv, _ = pool.shape
        stride = pool.stride()
        if (stride[0] == 0 and slots > 1) or (stride[1] == 0 and heads > 1) or (stride[2] == 0 and dv > 1):
            raise ValueError(f"{name}: expanded (stride 0), so rows share memory; a commit needs a row a slot")
        if part.pending is not None and part.pending.k.shape[0] != slots:
            raise ValueError(
                f"{name}: {slots} slots, but the pending chain of its factors has {part.pending.k.shape[0]}"
            )
        starts.add(pool.data_ptr() if slots else -1 - n)
        layers.append(CommitLayer(pool, part))
    if len(starts) != len(pools):
        raise ValueError("pool: two layers share a pool; every layer needs its own")
    return tuple(layers)
