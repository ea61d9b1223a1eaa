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
    if not 1 <= lead[1] <= MAX_PENDING:
        raise ValueError(f"pending.k: the capacity, dimension 1, must be 1 to {MAX_PENDING}, got {lead[1]}")
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
        # One test for the usual case; the checks below it find out what is wrong.
        if (
            isinstance(t, torch.Tensor)
            and t.dtype is like.dtype
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


class _Usual:
    """What the checks of a layer look at, of one that has passed them: the same in another layer passes as well."""

    def __init__(self, pool: torch.Tensor, part: Factors) -> None:
        self._tree, self._spec, self._mode, self._device = part.tree, part.spec, part.gate_mode, part.tree.device
        self._k, self._v, self._dtype = part.k.shape, part.v.shape, part.k.dtype
        self._pool, self._pool_dtype = pool.shape, pool.dtype
        gates = part.gates.items()
        self._names = tuple(part.gates)
        # Names that the family does not know are not looked at, whatever they hold.
        self._gates = tuple((n, t.shape, t.dtype) for n, t in gates if isinstance(t, torch.Tensor))

    def holds(self, pool: torch.Tensor, part: Factors) -> bool:
        """Return whether another layer differs in nothing that is checked; False says nothing."""
        if type(part) is not Factors:
            return False
        k, v, gates, device = part.k, part.v, part.gates, self._device
        if not (
            part.tree is self._tree
            and part.spec is self._spec
            and part.gate_mode == self._mode
            and type(gates) is dict
            and tuple(gates) == self._names
            and isinstance(k, torch.Tensor)
            and isinstance(v, torch.Tensor)
            and isinstance(pool, torch.Tensor)
            and k.dtype is self._dtype is v.dtype
            and k.shape == self._k
            and v.shape == self._v
            and k.stride()[-1] == 1 == v.stride()[-1]
            and pool.shape == self._pool
            and pool.dtype is self._pool_dtype
            and pool.stride()[-1] == 1
            and k.device == device == v.device
            and pool.device == device
        ):
            return False
        for name, shape, dtype in self._gates:
            t = gates[name]
            if not (isinstance(t, torch.Tensor) and t.shape == shape and t.dtype is dtype and t.device == device):
                return False
        return True


def check_layers(pools: tuple[torch.Tensor, ...], parts: tuple[Factors, ...], backend: str) -> tuple[CommitLayer, ...]:
    """Check the pools and factors of a commit and pair them.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, device or stride, different trees or families, or a pool that is given twice.
    """
    first = parts[0]
    layers: list[CommitLayer] = []
    starts: set[int] = set()
    read: list[torch.Tensor] = []
    usual: _Usual | None = None
    for n, (pool, part) in enumerate(zip(pools, parts, strict=True)):
        if usual is None or not usual.holds(pool, part):
            check_factors(f"factors[{n}]", part, first)
            name = "pool" if len(pools) == 1 else f"pool[{n}]"
            k, v = part.k, part.v
            check_state(name, pool, k.device, v.shape[-2], v.shape[-1], k.shape[-1], backend)
            if len(pools) > 1:
                usual = _Usual(pool, part)
        k, v, pending = part.k, part.v, part.pending
        slots = pool.shape[0]
        if pending is not None:
            of = f"factors[{n}].pending"
            if not isinstance(pending, PendingChain):
                not_a(of, pending, "a PendingChain or None")
            sizes = pending.k.shape
            if sizes[0] != slots:
                name = "pool" if len(pools) == 1 else f"pool[{n}]"
                raise ValueError(f"{name}: {slots} slots, but the pending chain of its factors has {sizes[0]}")
            if sizes[1] > MAX_PENDING:
                raise ValueError(f"{of}.k: the capacity is {sizes[1]}, at most {MAX_PENDING} is allowed")
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
                named += read_of_pending(part.pending, f"factors[{n}].pending")
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
    if type(gates) is not dict and not isinstance(gates, Mapping):
        not_a(f"{name}.gates", gates, "a mapping from gate names to tensors")
    for i in (*spec.node_gates(mode), *spec.parameters(mode)):
        if i.name not in gates:
            if i.default is None:
                raise ValueError(f"{name}.gates: missing {i.name}, which {spec.name!r} has with {mode!r} gates")
            continue
        t = gates[i.name]
        if not isinstance(t, torch.Tensor) or t.dtype not in i.dtypes or t.device != device:
            check_tensor(f"{name}.gates[{i.name!r}]", t, device, i.dtypes)
        if i.scalar:
            expected: tuple[int, ...] = (*tree.lead, heads[1])
        else:
            expected = i.sizes(heads, dims) if i.shape[0] != "node" else (*tree.lead, *i.sizes(heads, dims))
        if t.shape != expected:
            wrong_shape(f"{name}.gates[{i.name!r}]", t, expected, meaning(i))
