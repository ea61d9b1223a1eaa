"""Short forms for the inputs that families declare."""

from __future__ import annotations

import math

from bole_runtime.families.spec import DATA_DTYPES, GATE_DTYPES, InputSpec

#: The inputs that every family begins with.
QKV = (
    InputSpec("q", ("node", "HK", "dk"), DATA_DTYPES, "query", "both", None, "queries"),
    InputSpec("k", ("node", "HK", "dk"), DATA_DTYPES, "key", "both", None, "keys"),
    InputSpec("v", ("node", "HV", "dv"), DATA_DTYPES, "value", "both", None, "values"),
)


def node_gate(name: str, role: str, mode: str, doc: str, dim: str | None = None, heads: str = "HV") -> InputSpec:
    """Return an input given per node: a value a value head, or with ``dim`` a vector of ``dk`` or ``dv``."""
    shape = ("node", heads) if dim is None else ("node", heads, dim)
    return InputSpec(name, shape, GATE_DTYPES, role, mode, None, doc)


def parameter(
    name: str, mode: str, doc: str, dim: str | None = None, *, role: str = "parameter", optional: bool = False
) -> InputSpec:
    """Return an input given per value head, whatever the node; with ``dim`` a vector. Optional ones may be missing."""
    shape = ("HV",) if dim is None else ("HV", dim)
    return InputSpec(name, shape, GATE_DTYPES, role, mode, 0.0 if optional else None, doc)


def option(
    name: str, mode: str, default: float | None, doc: str, low: float = -math.inf, high: float = math.inf
) -> InputSpec:
    """Return a Python float within limits; without a default it must be given."""
    return InputSpec(name, (), (), "option", mode, default, doc, (low, high))
