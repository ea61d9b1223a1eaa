"""Registry of recurrence families."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from bole_runtime.families.gdn import GDN
from bole_runtime.families.spec import InputSpec, RecurrenceSpec

#: Every family, by name. Its sequential recurrence is ``bole_runtime/reference/<name>.py``.
FAMILIES: dict[str, RecurrenceSpec] = {GDN.name: GDN}

_OUT_OF_FORM = {
    "mamba1": "its decay depends on channel and state index together",
    "mamba": "Mamba1's decay depends on channel and state index together",
    "path": "path attention multiplies by a product of Householder matrices",
    "path_attention": "path attention multiplies by a product of Householder matrices",
    "log_linear": "log-linear attention keeps a growing set of states",
    "log_linear_attention": "log-linear attention keeps a growing set of states",
    "ttt": "test-time training updates are not linear in the state",
    "titans": "test-time training updates are not linear in the state",
}


def get_family(name: str) -> RecurrenceSpec:
    """Return the spec of a family.

    Raises:
        TypeError: ``name`` is not a string.
        ValueError: the family is unknown, or known to be outside the form that has a tree closed form.
    """
    spec = FAMILIES.get(name) if isinstance(name, str) else None
    if spec is not None:
        return spec
    if not isinstance(name, str):
        raise TypeError(f"recurrence: expected the name of a family, got {type(name).__name__}")
    known = ", ".join(sorted(FAMILIES))
    reason = _OUT_OF_FORM.get(name.lower().replace("-", "_").replace(" ", "_"))
    if reason is not None:
        raise ValueError(f"recurrence: {name!r} is outside the supported form: {reason}. Supported: {known}")
    raise ValueError(f"recurrence: unknown family {name!r}. Supported: {known}")


def get_reference(spec: RecurrenceSpec) -> ModuleType:
    """Return the module that holds the sequential recurrence of a family."""
    return import_module(f"bole_runtime.reference.{spec.name}")


__all__ = ["FAMILIES", "InputSpec", "RecurrenceSpec", "get_family", "get_reference"]
