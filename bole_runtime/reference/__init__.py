"""The sequential recurrence, node by node: the oracle of every other path. It reads trees on the host."""

from __future__ import annotations

from bole_runtime.reference.sequential import commit_sequential, flush_sequential, verify_sequential

__all__ = ["commit_sequential", "flush_sequential", "verify_sequential"]
