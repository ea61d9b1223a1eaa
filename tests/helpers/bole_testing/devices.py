"""Backends by device: generated kernels on a GPU, torch for what a test computes beside them on the CPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

from bole_runtime import set_backend


@contextlib.contextmanager
def by_device() -> Iterator[None]:
    """Let the device of a call choose its backend, whatever the environment says."""
    try:
        with mock.patch.dict(os.environ):
            # Forcing a backend would force it on the CPU trees of the float64 recurrence too.
            os.environ.pop("BOLE_BACKEND", None)
            set_backend(None)
            yield
    finally:
        set_backend(None)
