"""Backends of the library: ``triton`` (generated kernels), ``torch`` (closed form), ``reference`` (node by node)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from bole_runtime.backend_choice import backend_name, forced_backend, set_backend

if TYPE_CHECKING:
    import torch

    from bole_runtime.calls import CommitCall, VerifyCall
    from bole_runtime.families.spec import RecurrenceSpec

#: Name to module. A module has ``verify(call)``, which fills ``call.out``, and ``commit(call)``, which updates the
#: pools.
BACKENDS: dict[str, str] = {
    "triton": "bole_runtime.backends.triton_backend",
    "torch": "bole_runtime.backends.torch_backend",
    "reference": "bole_runtime.backends.reference_backend",
}


class Backend(NamedTuple):
    """The two operations of a backend.

    ``prepare``, where a backend has it, does the host's work of a commit once: it returns a function of slots, accepted
    nodes and actions that can be called every round.
    """

    name: str
    verify: Callable[[VerifyCall], None]
    commit: Callable[[CommitCall], None]
    prepare: Callable[[CommitCall], Callable[..., None]] | None = None


_loaded: dict[str, Backend] = {}
#: What was warned about.
_warned: set[str] = set()


def get_backend(device: torch.device, spec: RecurrenceSpec | None = None) -> Backend:
    """Return the backend that serves a device, and with ``spec`` a family; see :func:`backend_name`.

    A family without kernels runs on the torch backend, with one warning a process.

    Raises:
        NotImplementedError: the family has no kernels and ``triton`` was asked for by name.
    """
    name = backend_name(device)
    if name == "triton" and spec is not None and not spec.kernels:
        name = without_kernels(spec)
    backend = _loaded.get(name)
    if backend is None:
        module = import_module(BACKENDS[name])
        backend = _loaded[name] = Backend(name, module.verify, module.commit, getattr(module, "prepare_commit", None))
    return backend


def without_kernels(spec: RecurrenceSpec, for_what: str = "") -> str:
    """Return the backend that serves what a family has no kernels for: ``torch``, with one warning a process.

    Args:
        spec: the family.
        for_what: empty where it has none at all; otherwise the problems it has none for.

    Raises:
        NotImplementedError: ``triton`` was asked for by name.
    """
    lacks = f"family {spec.name!r} has no Triton kernels{f' for {for_what}' if for_what else ''}"
    if forced_backend() == "triton":
        raise NotImplementedError(
            f"recurrence: {lacks}; BOLE_BACKEND=torch serves it, and so does a device whose backend is not forced"
        )
    if lacks not in _warned:
        _warned.add(lacks)
        warnings.warn(f"{lacks}: it runs on the torch backend, which is correct but slow", stacklevel=5)
    return "torch"


__all__ = ["BACKENDS", "Backend", "backend_name", "get_backend", "set_backend", "without_kernels"]
