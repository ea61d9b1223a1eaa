"""One acceptance on both backends."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bole_runtime import Acceptance, set_backend

FIELDS = ("accepted", "path", "lengths", "bonus", "tokens", "source", "target", "status")


def same_on_both(call: Callable[[], Acceptance]) -> Acceptance:
    """Run a call with the torch and the Triton backend, and return the result, which must be the same."""
    results = []
    for backend in ("torch", "triton"):
        set_backend(backend)
        try:
            results.append(call())
        finally:
            set_backend(None)
    for name in FIELDS:
        assert torch.equal(*(getattr(r, name) for r in results)), (name, results)
    return results[0]
