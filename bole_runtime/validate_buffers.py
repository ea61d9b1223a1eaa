"""Checks of buffers: pending chains, capture buffers and outputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.factors import Factors, PendingChain
from bole_runtime.families import RecurrenceSpec
from bole_runtime.families.spec import DATA_DTYPES
from bole_runtime.kernels.problem import PENDING_BUCKETS
from bole_runtime.validate import check_last_stride, check_tensor, meaning, not_a, wrong_shape
from bole_runtime.validate_memory import apart, check_apart

MAX_PENDING = PENDING_BUCKETS[-1]


def check_pending(
    spec: RecurrenceSpec, mode: str, pending: PendingChain, k: torch.Tensor, v: torch.Tensor, slots: int,
    name: str = "pending",
) -> None:  # fmt: skip
    """Check a pending chain against the call's gate mode, k and v, and the slots of the pool.

    Args:
        spec: the family.
        mode: gate mode of the call, or of its factors.
        pending: the chain.
        k: of the call.
        v: of the call.
        slots: of the pool.
        name: of the chain in messages.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device, shape, stride or gate name.
    """
    if not isinstance(pending, PendingChain):
        not_a(name, pending, "a PendingChain or None")
    device, dtype = k.device, k.dtype
    ring_k, ring_v, gates = pending.k, pending.v, pending.gates
    # A commit checks a chain a layer: names are put together only where something is wrong.
    if not (
        isinstance(ring_k, torch.Tensor)
        and isinstance(ring_v, torch.Tensor)
        and not (ring_k.is_nested or ring_v.is_nested)
        and ring_k.layout is ring_v.layout is torch.strided
        and ring_k.dtype is dtype is ring_v.dtype
        and ring_k.device == device == ring_v.device
    ):
        check_tensor(f"{name}.k", ring_k, device, (dtype,))
        check_tensor(f"{name}.v", ring_v, device, (dtype,))
    # Slices of a tuple: those of a torch.Size take ten times as long.
    shape, k_rows, v_rows = tuple(ring_k.shape), tuple(k.shape)[-2:], tuple(v.shape)[-2:]
    if len(shape) != 4:
        raise ValueError(f"{name}.k: expected [slots, capacity, HK, dk], got shape {shape}")
    lead = (slots, shape[1])
    if not 1 <= lead[1] <= MAX_PENDING:
        raise ValueError(f"{name}.k: the capacity, dimension 1, must be 1 to {MAX_PENDING}, got {lead[1]}")
    if shape != (*lead, *k_rows):
        wrong_shape(f"{name}.k", ring_k, (*lead, *k_rows), "slots of the pool, capacity, HK, dk")
    if ring_v.shape != (*lead, *v_rows):
        wrong_shape(f"{name}.v", ring_v, (*lead, *v_rows), "slots of the pool, capacity, HV, dv")
    if not ring_k.stride()[-1] == ring_v.stride()[-1] == 1:
        check_last_stride(f"{name}.k", ring_k)
        check_last_stride(f"{name}.v", ring_v)
    kept = spec.kept_mode(mode)
    needed = spec.node_gates(kept)
    if not isinstance(gates, Mapping) or len(gates) != len(needed) or not all(i.name in gates for i in needed):
        given = sorted(map(str, gates)) if isinstance(gates, Mapping) else type(gates).__name__
        why = "ready gates, whatever the call's gate mode" if spec.keeps_ready else f"of the call's gate mode {mode!r}"
        raise ValueError(f"{name}.gates: expected exactly {sorted(i.name for i in needed)} ({why}), got {given}")
    check_gate_buffers(spec, kept, f"{name}.gates", gates, lead, k, v)
    for what, t in (("length", pending.length), ("start", pending.start)):
        if not isinstance(t, torch.Tensor) or t.dtype is not torch.int32 or t.device != device or t.is_nested:
            check_tensor(f"{name}.{what}", t, device, (torch.int32,))
        if t.shape != (slots,) or not t.is_contiguous():
            wrong_shape(f"{name}.{what}", t, (slots,), "one entry a slot, contiguous")


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
        # One test for the usual case; the checks below it find out what is wrong.
        if (
            isinstance(t, torch.Tensor)
            and t.dtype is like.dtype
            and t.layout is torch.strided
            and not t.is_nested
            and t.shape == like.shape
            and t.device == like.device
            and t.is_contiguous()
        ):
            continue
        check_tensor(name, t, k.device, (like.dtype,))
        if t.shape != like.shape:
            wrong_shape(name, t, like.shape, "the shape of the input it captures")
        check_last_stride(name, t)
        if t.shape[-2] > 1 and t.stride(-2) != t.shape[-1]:
            raise ValueError(f"{name}: the heads of a node must be contiguous, got strides {t.stride()}")
    check_gate_buffers(spec, kept, "factors.gates", factors.gates, v.shape[:-2], k, v)
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
    ks, vs, device = k.shape, v.shape, k.device
    scalar = (*lead, vs[-2])
    layout: tuple[int, ...] | None = None
    same = True
    for i in spec.node_gates(mode):
        expected = scalar if i.scalar else (*lead, *i.sizes((ks[-2], vs[-2]), (ks[-1], vs[-1])))
        given = gates.get(i.name)
        # One test for the usual case; the checks below it find out what is wrong.
        if not (
            isinstance(given, torch.Tensor)
            and (given.dtype is dtype if spec.keeps_ready else given.dtype in i.dtypes)
            and given.layout is torch.strided
            and not given.is_nested
            and given.shape == expected
            and given.device == device
        ):
            allowed = (dtype,) if spec.keeps_ready else i.dtypes
            given = check_tensor(f"{name}[{i.name!r}]", given, device, allowed)
            if given.shape != expected:
                wrong_shape(f"{name}[{i.name!r}]", given, expected, meaning(i))
        strides = given.stride()
        if strides[-1] != 1:
            check_last_stride(f"{name}[{i.name!r}]", given)
        same = same and layout in (None, strides[:-1])
        layout = strides[:-1]
    if spec.keeps_ready and not same:
        found = {i.name: gates[i.name].stride()[:-1] for i in spec.node_gates(mode)}
        raise ValueError(f"{name}: all must have the same strides, got {found}")


def check_out(
    out: torch.Tensor, v: torch.Tensor, out_dtype: torch.dtype | None, inputs: tuple[tuple[str, torch.Tensor], ...] = ()
) -> None:
    """Check an output given by the caller: shape of v, and no memory shared with ``inputs``, if there are any.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong device, shape or stride, or an overlap.
    """
    check_tensor("out", out, v.device, DATA_DTYPES if out_dtype is None else (out_dtype,))
    if out.shape != v.shape:
        wrong_shape("out", out, v.shape, "the shape of v")
    check_last_stride("out", out)
    if inputs and not apart((out,), (t for _, t in inputs)):
        check_apart((("out", out),), inputs)


def check_memory(
    out: torch.Tensor | None, factors: Factors | None, workspace: torch.Tensor | None,
    read: tuple[torch.Tensor, ...], gates: Mapping[str, torch.Tensor], pending: PendingChain | None,
) -> None:  # fmt: skip
    """Check that what a verification writes shares no memory with itself or with what it reads.

    Args:
        out: of the caller, or None. Same for ``factors`` and ``workspace``.
        factors: buffers to fill.
        workspace: scratch memory.
        read: q, k, v, state and slots.
        gates: of the call.
        pending: the chain above the roots.

    Raises:
        ValueError: an overlap.
    """
    written: tuple[torch.Tensor, ...] = () if out is None else (out,)
    if factors is not None:
        written = (*written, factors.k, factors.v, *factors.gates.values())
    if workspace is not None:
        written = (*written, workspace)
    everything = (*read, *gates.values())
    if pending is not None:
        everything = (*everything, pending.k, pending.v, *pending.gates.values(), pending.length, pending.start)
    if apart(written, everything):
        return
    names = [] if out is None else ["out"]
    if factors is not None:
        names += ["factors.k", "factors.v", *(f"factors.gates[{name!r}]" for name in factors.gates)]
    named = list(zip(("q", "k", "v", "state", "slots", *gates), everything, strict=False))
    if pending is not None:
        named += read_of_pending(pending)
    check_apart(list(zip((*names, "workspace"), written, strict=False)), named)


def read_of_pending(pending: PendingChain, name: str = "pending") -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a pending chain by name."""
    gates = ((f"{name}.gates[{gate!r}]", t) for gate, t in pending.gates.items())
    counters = ((f"{name}.length", pending.length), (f"{name}.start", pending.start))
    return [(f"{name}.k", pending.k), (f"{name}.v", pending.v), *gates, *counters]
