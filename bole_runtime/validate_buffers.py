"""Checks of buffers: pending chains, capture buffers, outputs, and the layers of a commit."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.calls import CommitLayer
from bole_runtime.factors import Factors, PendingChain
from bole_runtime.families import RecurrenceSpec
from bole_runtime.families.spec import DATA_DTYPES
from bole_runtime.kernels.problem import PENDING_BUCKETS
from bole_runtime.validate import check_last_stride, check_state, check_tensor, meaning, not_a, wrong_shape
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
        if not isinstance(t, torch.Tensor) or t.dtype is not torch.int32 or t.device != device:
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


class _CheckedChain:
    """What :func:`check_pending` looks at, of a chain that has passed it: the same of another layer passes as well."""

    def __init__(self, part: Factors, chain: PendingChain, slots: int) -> None:
        self._of = (part.gate_mode, part.k.shape, part.v.shape, part.k.dtype, slots)
        self._names, self._device = list(chain.gates), part.k.device
        tensors = (chain.k, chain.v, *chain.gates.values())
        self._facts = [(t.shape, t.dtype, t.stride()) for t in tensors]
        self._length, self._start = chain.length, chain.start

    def like(self, part: Factors, chain: PendingChain, slots: int) -> bool:
        """Return whether a chain of another layer differs in nothing that is checked; False says nothing."""
        if (
            type(chain) is not PendingChain
            or chain.length is not self._length
            or chain.start is not self._start
            or type(chain.gates) is not dict
            or list(chain.gates) != self._names
            or (part.gate_mode, part.k.shape, part.v.shape, part.k.dtype, slots) != self._of
        ):
            return False
        for t, (shape, dtype, stride) in zip((chain.k, chain.v, *chain.gates.values()), self._facts, strict=True):
            if not (
                isinstance(t, torch.Tensor)
                and t.shape == shape
                and t.dtype is dtype
                and t.stride() == stride
                and t.device == self._device
            ):
                return False
        return True


def check_layers(
    pools: tuple[torch.Tensor, ...], parts: tuple[Factors, ...], backend: str, chain: str = "factors[{}].pending"
) -> tuple[CommitLayer, ...]:
    """Check the pools and factors of a commit, pending chains included, and pair them.

    Args:
        pools: one a layer.
        parts: one a layer.
        backend: that serves the commit.
        chain: names the chain of a layer in messages, with a place for its number.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, device or stride, different trees or families, or a pool that is given twice.
    """
    first = parts[0]
    layers: list[CommitLayer] = []
    starts: set[int] = set()
    read: list[torch.Tensor] = []
    checked: _CheckedChain | None = None
    for n, (pool, part) in enumerate(zip(pools, parts, strict=True)):
        of = f"factors[{n}]"
        check_factors(of, part, first)
        k, v, pending = part.k, part.v, part.pending
        if k.dtype is torch.float64 and backend == "triton":
            raise TypeError(f"{of}.k: dtype torch.float64 is served by the torch and reference backends only")
        name = "pool" if len(pools) == 1 else f"pool[{n}]"
        check_state(name, pool, k.device, v.shape[-2], v.shape[-1], k.shape[-1], backend)
        slots = pool.shape[0]
        if pending is not None:
            if checked is None or not checked.like(part, pending, slots):
                check_pending(first.spec, part.gate_mode, pending, k, v, slots, chain.format(n))
                checked = _CheckedChain(part, pending, slots)
            read += (pending.k, pending.v, *pending.gates.values(), pending.length, pending.start)
        starts.add(pool.data_ptr() if slots else -1 - n)
        read += (k, v, *part.gates.values())
        layers.append(CommitLayer(pool, part))
    if len(starts) != len(pools):
        raise ValueError("pool: two layers share a pool; every layer needs its own")
    if not apart(pools, read):
        named: list[tuple[str, torch.Tensor]] = []
        for n, part in enumerate(parts):
            named += ((f"factors[{n}].k", part.k), (f"factors[{n}].v", part.v))
            named += ((f"factors[{n}].gates[{gate!r}]", t) for gate, t in part.gates.items())
            if part.pending is not None:
                named += read_of_pending(part.pending, chain.format(n))
        names = ["pool"] if len(pools) == 1 else [f"pool[{n}]" for n in range(len(pools))]
        check_apart(list(zip(names, pools, strict=True)), named)
    return tuple(layers)


def check_factors(name: str, part: Factors, first: Factors) -> None:
    """Check factors given to a commit: those of a verification, or edited ones, of the tree and family of the first.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, device, gate mode or gate name, or another tree or family than the first.
    """
    if not isinstance(part, Factors):
        not_a(name, part, "a Factors")
    tree, spec = part.tree, part.spec
    if tree is not first.tree or spec is not first.spec:
        raise ValueError(f"{name}: all layers of a commit must share the tree and the family of factors[0]")
    device, k, v = tree.device, part.k, part.v
    # One test for the usual case; the calls below it find out what is wrong.
    if not (
        isinstance(k, torch.Tensor)
        and isinstance(v, torch.Tensor)
        and k.dtype in DATA_DTYPES
        and v.dtype is k.dtype
        and k.device == device == v.device
    ):
        check_tensor(f"{name}.k", k, device, DATA_DTYPES)
        check_tensor(f"{name}.v", v, device, (k.dtype,))
    if k.shape[:-2] != tree.lead or v.shape[:-2] != tree.lead:
        raise ValueError(f"{name}: k {tuple(k.shape)} and v {tuple(v.shape)} are not of the tree's rows {tree.lead}")
    heads, dims = (k.shape[-2], v.shape[-2]), (k.shape[-1], v.shape[-1])
    if 0 in heads or 0 in dims or heads[1] % heads[0]:
        raise ValueError(
            f"{name}.v: HV = {heads[1]} must be a positive multiple of HK = {heads[0]}, dk and dv at least 1; got k "
            f"{tuple(k.shape)} and v {tuple(v.shape)}"
        )
    if not k.stride()[-1] == v.stride()[-1] == 1:
        check_last_stride(f"{name}.k", k)
        check_last_stride(f"{name}.v", v)
    mode, gates = part.gate_mode, part.gates
    if mode not in spec.modes:
        raise ValueError(
            f"{name}.gate_mode: {mode!r} is not allowed for {spec.name!r}; allowed: {', '.join(spec.modes)}"
        )
    if not isinstance(gates, Mapping):
        not_a(f"{name}.gates", gates, "a mapping from gate names to tensors")
    for i in (*spec.node_gates(mode), *spec.parameters(mode)):
        if i.name not in gates:
            if i.default is None:
                raise ValueError(f"{name}.gates: missing {i.name}, which {spec.name!r} has with {mode!r} gates")
            continue
        t = gates[i.name]
        if not isinstance(t, torch.Tensor) or t.dtype not in i.dtypes or t.device != device:
            check_tensor(f"{name}.gates[{i.name!r}]", t, device, i.dtypes)
        expected = i.sizes(heads, dims) if i.shape[0] != "node" else (*tree.lead, *i.sizes(heads, dims))
        if t.shape != expected:
            wrong_shape(f"{name}.gates[{i.name!r}]", t, expected, meaning(i))
