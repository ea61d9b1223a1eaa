"""Launches of the generated Triton kernels."""

from __future__ import annotations

from bole_runtime.backends.triton_backend.commit import commit, prepare_commit
from bole_runtime.backends.triton_backend.verify import verify

__all__ = ["commit", "prepare_commit", "verify"]
