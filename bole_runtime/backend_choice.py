"""Which backend serves a device. Below trees, sampling and backends, which all ask: it imports none of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Names of the backends.
NAMES = ("triton", "torch", "reference")

_forced: str | None = None
_env_read = False


def set_backend(name: str | None) -> None:
    """Force a backend for the whole process, or go back to ``BOLE_BACKEND`` and the device with None.

    ``BOLE_BACKEND`` is read once, at the first call; later changes of the environment need ``set_backend(None)``.

    Raises:
        ValueError: the name is unknown.
    """
    global _forced, _env_read
    if name is not None:
        _known(name, "name")
    _forced, _env_read = name, name is not None


def _known(name: str, what: str) -> str:
    if name not in NAMES:
        raise ValueError(f"{what}: unknown backend {name!r}; allowed: {', '.join(NAMES)}")
    return name


def _read_env() -> None:
    global _forced, _env_read
    name = os.environ.get("BOLE_BACKEND")
    _forced = _known(name, "BOLE_BACKEND") if name else None
    _env_read = True


def backend_name(device: torch.device) -> str:
    """Return the backend that serves a device: the forced one, else ``triton`` on CUDA and ``torch`` elsewhere.

    Raises:
        ValueError: ``BOLE_BACKEND`` names no backend.
        RuntimeError: ``triton`` is forced on a CPU without ``TRITON_INTERPRET=1``.
    """
    if not _env_read:
        _read_env()
    if _forced is None:
        return "triton" if device.type == "cuda" else "torch"
    if _forced == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "the triton backend runs on a CPU only under TRITON_INTERPRET=1, set before triton is imported"
        )
    return _forced


def forced_backend() -> str | None:
    """Return the backend that was asked for by name, None when the device decides."""
    if not _env_read:
        _read_env()
    return _forced
