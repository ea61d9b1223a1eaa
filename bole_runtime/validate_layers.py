"""Checks of what a commit is given a layer: its pool and its factors, those of a verification or edited ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.calls import CommitLayer
from bole_runtime.factors import NO_OPTIONS, Factors, PendingChain
from bole_runtime.families.spec import DATA_DTYPES
from bole_runtime.validate import (
    check_last_stride,
    check_number,
    check_option,
    check_state,
    check_tensor,
    meaning,
    not_a,
    wrong_shape,
)
from bole_runtime.validate_buffers import check_pending, read_of_pending
from bole_runtime.validate_memory import apart, check_apart


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
        self._scale, self._options = part.beta_scale, part.options

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
            and part.beta_scale == self._scale
            and (part.options is self._options or part.options == self._options)
        ):
            return False
        for name, shape, dtype in self._gates:
            t = gates[name]
            if not (isinstance(t, torch.Tensor) and t.shape == shape and t.dtype is dtype and t.device == device):
                return False
            if t.layout is not torch.strided or t.stride()[-1] != 1:
                return False
        return True


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
    usual: _Usual | None = None
    checked: _CheckedChain | None = None
    for n, (pool, part) in enumerate(zip(pools, parts, strict=True)):
        try:
            known = usual is not None and usual.holds(pool, part)
        except RuntimeError:  # A tensor without a shape or strides: the checks name it.
            known = False
        if not known:
            check_factors(f"factors[{n}]", part, first)
            name = "pool" if len(pools) == 1 else f"pool[{n}]"
            k, v = part.k, part.v
            if k.dtype is torch.float64 and backend == "triton":
                raise TypeError(
                    f"factors[{n}].k: dtype torch.float64 is served by the torch and reference backends only"
                )
            check_state(name, pool, k.device, v.shape[-2], v.shape[-1], k.shape[-1], backend)
            if len(pools) > 1:
                usual = _Usual(pool, part)
        k, v, pending = part.k, part.v, part.pending
        slots = pool.shape[0]
        if pending is not None:
            try:
                known = checked is not None and checked.like(part, pending, slots)
            except RuntimeError:
                known = False
            if not known:
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
        and not (k.is_nested or v.is_nested)
        and k.layout is v.layout is torch.strided
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
        if (
            not isinstance(t, torch.Tensor)
            or t.dtype not in i.dtypes
            or t.device != device
            or t.is_nested
            or t.layout is not torch.strided
        ):
            check_tensor(f"{name}.gates[{i.name!r}]", t, device, i.dtypes)
        if i.scalar:
            expected: tuple[int, ...] = (*tree.lead, heads[1])
        else:
            expected = i.sizes(heads, dims) if i.shape[0] != "node" else (*tree.lead, *i.sizes(heads, dims))
        if t.shape != expected:
            wrong_shape(f"{name}.gates[{i.name!r}]", t, expected, meaning(i))
        if t.stride()[-1] != 1:
            check_last_stride(f"{name}.gates[{i.name!r}]", t)
    _check_floats(name, part)


def _check_floats(name: str, part: Factors) -> None:
    """Check the floats of edited factors as those of a call are."""
    scale, options = part.beta_scale, part.options
    if type(scale) is not float or scale != 1.0:
        check_number(f"{name}.beta_scale", scale)
    if options is NO_OPTIONS:
        return
    if not isinstance(options, Mapping):
        not_a(f"{name}.options", options, "a mapping from names to floats")
    for i in part.spec.options(part.gate_mode):
        if i.name in options:
            check_option(i, options[i.name], f"{name}.options[{i.name!r}]")
