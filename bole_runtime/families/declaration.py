"""Checks that the declaration of a family holds together, when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from bole_runtime.families.spec import InputSpec, RecurrenceSpec

_DECAY_SHAPES = {"head": ("HV",), "scalar": ("node", "HV"), "channel": ("node", "HV", "dk")}
_HEADS = ("HK", "HV")
_DIMS = ("dk", "dv")


def check_declaration(spec: RecurrenceSpec) -> None:
    """Check a family's declaration.

    Raises:
        ValueError: it contradicts itself, or is outside the form. The message names the field.
    """
    if not spec.name.isidentifier() or spec.name != spec.name.lower():
        _bad(spec, f"name: {spec.name!r} is no lower-case identifier")
    names = [i.name for i in spec.inputs]
    if names[:3] != ["q", "k", "v"] or len(set(names)) != len(names):
        _bad(spec, f"inputs: expected q, k, v first and no name twice, got {names}")
    for i in spec.inputs:
        _check_input(spec, i)
    modes = set(spec.modes) - {"ready"}
    if spec.make_ready.keys() != modes:
        _bad(spec, f"make_ready: expected a function for {sorted(modes)}, got {sorted(spec.make_ready)}")
    if modes and any(i.mode == "ready" for i in spec.parameters("ready")):
        _bad(spec, "inputs: a parameter of the ready mode must be one of every mode ('both')")
    _check_decay(spec)
    if (spec.erase == "none") != (not spec.erase_key) or (spec.erase == "none") != (not spec.erase_write):
        _bad(spec, f"erase_key, erase_write: needed unless erase is 'none' (it is {spec.erase!r}), and only then")
    if spec.erase_sign not in (-1.0, 1.0):
        _bad(spec, f"erase_sign: {spec.erase_sign} is neither -1.0 nor 1.0")
    if spec.erase == "undecayed" and spec.decay == "none":
        _bad(spec, "erase: without a decay, 'decayed' and 'undecayed' are one; say 'decayed'")
    for field, dim in (("erase_key", "dk"), ("erase_write", "dk"), ("write_key", "dk"), ("write_value", "dv")):
        product = getattr(spec, field)
        if product:
            _check_product(spec, field, product, dim)
    if spec.skip:
        _check_product(spec, "skip", spec.skip, "dv", parameters=True)
    if spec.kernels:
        _check_kernels(spec)
    if not set(spec.normed) <= set(names):
        _bad(spec, f"normed: {sorted(set(spec.normed) - set(names))} are no inputs")


def _bad(spec: RecurrenceSpec, fault: str) -> NoReturn:
    raise ValueError(f"family {spec.name!r}: {fault}")


def _check_input(spec: RecurrenceSpec, i: InputSpec) -> None:
    shape = i.shape[1:] if i.shape[:1] == ("node",) else i.shape
    heads_and_dim = (len(shape) == 1 and shape[0] in _HEADS) or (
        len(shape) == 2 and shape[0] in _HEADS and shape[1] in _DIMS
    )
    if i.shape and not heads_and_dim:
        _bad(spec, f"inputs: {i.name} has shape {i.shape}, expected ['node',] 'HK' or 'HV' [, 'dk' or 'dv']")
    if i.shape == ("node", "HK"):
        _bad(spec, f"inputs: {i.name} has a value a key head; gates have one a value head")
    if bool(i.shape) != bool(i.dtypes):
        _bad(spec, f"inputs: {i.name} needs dtypes if and only if it is a tensor")
    if not i.doc:
        _bad(spec, f"inputs: {i.name} has no doc")
    if i.default is not None and i.shape[:1] == ("node",):
        _bad(spec, f"inputs: {i.name} is given per node, so it has no default")


def _check_decay(spec: RecurrenceSpec) -> None:
    ready = [i for i in spec.gates("ready") if i.role == "log_decay"]
    expected = _DECAY_SHAPES.get(spec.decay)
    if spec.decay != "none" and expected is None:
        _bad(spec, f"decay: {spec.decay!r} is none of none, {', '.join(_DECAY_SHAPES)}")
    if [i.shape for i in ready] != ([] if expected is None else [expected]):
        given = ", ".join(f"{i.name} {i.shape}" for i in ready) or "nothing"
        want = "nothing" if expected is None else f"one input of shape {expected}"
        _bad(spec, f"decay: {spec.decay!r} takes {want} of role 'log_decay' in the ready mode, got {given}")


def _check_kernels(spec: RecurrenceSpec) -> None:
    """Check that the templates have what a family needs."""
    ready = {i.name: i for i in spec.node_gates("ready")}
    written = [ready[name] for name in spec.write_value[1:] if name in ready]
    if len(written) != len(spec.write_value) - 1 or [i.role for i in written] not in ([], ["write_gate"]):
        _bad(spec, "kernels: the templates have no such gates or updates")
    if not _has_erase(spec, ready) or not _has_vectors(spec):
        _bad(spec, "kernels: the templates have no such gates or updates")
    if spec.write_key != ("k",) or spec.output != "after" or len(spec.skip) not in (0, 2):
        _bad(spec, "kernels: the templates write k, read the new state, and skip v times a parameter")
    used = {i.name for i in written} | ({*spec.erase_key, *spec.erase_write} & ready.keys())
    if len(ready) != len(used) + (spec.decay in ("scalar", "channel")):
        _bad(spec, "kernels: the templates know a log-decay and a write gate a node")
    if (len(spec.modes) > 1) != bool(spec.gate_formula):
        _bad(spec, "gate_formula: needed for kernels with raw gates, and only then")
    raw = {i.name for mode in spec.modes if mode != "ready" for i in spec.node_gates(mode)}
    if spec.unit_gate and spec.unit_gate not in raw:
        _bad(spec, f"unit_gate: {spec.unit_gate!r} is no raw gate")


def _has_erase(spec: RecurrenceSpec, ready: Mapping[str, InputSpec]) -> bool:
    """Whether the templates erase as a family does: with k, k times a gate, or another key; times what is written."""
    if spec.erase == "none":
        return True
    row, *factors = spec.erase_key
    gates = [name for name in factors if name not in spec.write_value[1:]]
    own = (row != "k") + len(gates) + (spec.merged and spec.erase_sign > 0)
    keys = [name for name in (row, *gates, *spec.erase_write) if name != "k"]
    if own > 1 or len(spec.erase_write) != 1 or any(n not in ready or ready[n].shape[-1] != "dk" for n in keys):
        return False
    if spec.decay == "channel" and row in spec.normed and row != "k":
        return False
    # One decay a head: rows of a key of its own beside those of q and k, and what is written is what is taken away.
    if spec.decay == "channel":
        return all(ready[n].shape[1] == "HV" for n in keys)
    return spec.decay != "head" and spec.merged and not gates and tuple(factors) == spec.write_value[1:]


def _has_vectors(spec: RecurrenceSpec) -> bool:
    """Whether the templates take the vectors and parameters of a family."""
    wide = [i for i in _all_parameters(spec) if not i.per_head]
    if spec.decay == "channel":
        return all(i.shape == ("HV", "dk") for i in wide)
    ready = [i for i in spec.node_gates("ready") if not i.scalar]
    raw = [i for mode in spec.modes for i in spec.node_gates(mode) if not i.scalar]
    return not wide and all(i.name in spec.erase_key[:1] for i in ready) and raw == ready * len(spec.modes)


def _all_parameters(spec: RecurrenceSpec) -> list[InputSpec]:
    return [i for mode in spec.modes for i in spec.parameters(mode)]


def _check_product(
    spec: RecurrenceSpec, field: str, product: tuple[str, ...], dim: str, parameters: bool = False
) -> None:
    ready = {i.name: i for i in (*spec.inputs[:3], *spec.gates("ready")) if i.shape}
    vectors = 0
    for name in product:
        i = ready.get(name)
        if i is None or (i.shape[0] != "node" and not parameters):
            _bad(spec, f"{field}: {name!r} is no input that a ready call has per node")
        if i.shape[-1] in _DIMS and i.shape[-1] != dim:
            _bad(spec, f"{field}: {name!r} is a vector of {i.shape[-1]}, expected {dim}")
        vectors += i.shape[-1] == dim
    if not vectors:
        _bad(spec, f"{field}: none of {product} is a vector of {dim}")
