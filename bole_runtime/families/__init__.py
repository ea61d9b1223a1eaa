"""Registry of recurrence families."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol, cast

import torch

from bole_runtime.families.additive import (
    GLA,
    LIGHTNING,
    LINEAR,
    RETENTION,
    SIMPLE_GLA,
    lightning_log_decay,
    retention_log_decay,
)
from bole_runtime.families.comba import COMBA
from bole_runtime.families.deltanet import DELTANET
from bole_runtime.families.gdn import GDN
from bole_runtime.families.gdn2 import GDN2
from bole_runtime.families.kda import KDA
from bole_runtime.families.mamba2 import MAMBA2
from bole_runtime.families.rwkv7 import RWKV7
from bole_runtime.families.spec import InputSpec, RecurrenceSpec

_SHIPPED = (GDN, DELTANET, KDA, GDN2, COMBA, RWKV7, MAMBA2, LIGHTNING, RETENTION, SIMPLE_GLA, GLA, LINEAR)
#: Every family, by name.
FAMILIES: dict[str, RecurrenceSpec] = {spec.name: spec for spec in _SHIPPED}
#: The names of those with Triton kernels, which can be tuned.
KERNEL_FAMILIES: tuple[str, ...] = tuple(spec.name for spec in _SHIPPED if spec.kernels)

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


class Reference(Protocol):
    """The sequential recurrence of a family: a module or an object with these two functions."""

    def ready_gates(
        self, gates: Mapping[str, torch.Tensor], mode: str, options: Mapping[str, float], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Return the ready gates in ``dtype``, computed in that dtype."""

    def step(
        self,
        state: torch.Tensor,
        q: torch.Tensor | None,
        k: torch.Tensor,
        v: torch.Tensor,
        gates: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the state after one token and its output; q None asks for no output. Every tensor is [HV, ...]."""


_references: dict[str, Reference] = {}


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
    reason = _out_of_form(name)
    if reason is not None:
        raise ValueError(f"recurrence: {name!r} is outside the supported form: {reason}. Supported: {known}")
    raise ValueError(f"recurrence: unknown family {name!r}. Supported: {known}")


def register_family(spec: RecurrenceSpec, reference: Reference) -> RecurrenceSpec:
    """Add a family of one's own, for ``verify(recurrence=name)`` on the torch and reference backends.

    Args:
        spec: the declaration; it was checked when it was made.
        reference: its sequential recurrence, a module or an object with ``step`` and ``ready_gates``.

    Returns:
        The spec.

    Raises:
        TypeError: a wrong type, or a reference without these functions.
        ValueError: the name is taken, or that of a recurrence outside the form; or ``spec.kernels`` is set, which
            only families with templates may be.
    """
    if not isinstance(spec, RecurrenceSpec):
        raise TypeError(f"spec: expected a RecurrenceSpec, got {type(spec).__name__}")
    missing = [n for n in ("step", "ready_gates") if not callable(getattr(reference, n, None))]
    if missing:
        raise TypeError(f"reference: {type(reference).__name__} has no function {' and no function '.join(missing)}")
    reason = _out_of_form(spec.name)
    if spec.name in FAMILIES or reason is not None:
        why = "there is a family of that name" if reason is None else reason
        raise ValueError(f"spec: the name {spec.name!r} cannot be registered: {why}")
    if spec.kernels:
        raise ValueError(f"spec: {spec.name!r} sets kernels, but no templates come with a registered family")
    FAMILIES[spec.name] = spec
    _references[spec.name] = reference
    return spec


def _out_of_form(name: str) -> str | None:
    return _OUT_OF_FORM.get(name.lower().replace("-", "_").replace(" ", "_"))


def get_reference(spec: RecurrenceSpec) -> Reference:
    """Return the sequential recurrence of a family: ``bole_runtime/reference/<name>.py``, or what was registered.

    Raises:
        ValueError: the family is neither shipped nor registered.
    """
    registered = _references.get(spec.name)
    if registered is not None:
        return registered
    if FAMILIES.get(spec.name) is not spec:
        raise ValueError(f"recurrence: family {spec.name!r} has no reference; register_family() takes one")
    return cast(Reference, import_module(f"bole_runtime.reference.{spec.name}"))


__all__ = [
    "FAMILIES",
    "KERNEL_FAMILIES",
    "InputSpec",
    "RecurrenceSpec",
    "Reference",
    "get_family",
    "get_reference",
    "lightning_log_decay",
    "register_family",
    "retention_log_decay",
]
