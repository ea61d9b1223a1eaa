"""Interpreted kernels: one thread, and the Triton backend on the CPU."""

from __future__ import annotations

import pytest


@pytest.fixture
def triton_on_cpu():
    """Serve calls on CPU tensors with interpreted kernels."""
    import torch

    from bole_runtime import set_backend
    from bole_runtime.backends.scratch import poisoned

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny operations: more threads only wait for each other
    set_backend("triton")
    with poisoned():
        yield
    set_backend(None)
    torch.set_num_threads(threads)
