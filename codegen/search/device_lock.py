"""One process at a time computes on a GPU while something is timed there.

The lock is a file by the identity of the device, so that two runs on one GPU take turns too. The operating system drops
it with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from bole_codegen.search import phases


class DeviceLock:
    """The turn to use a device.

    Args:
        path: the lock file; None does not lock.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @contextlib.contextmanager
    def held(self, phase: str) -> Iterator[None]:
        """Wait for the device, then say that ``phase`` begins."""
        if self._path is None:
            phases.enter(phase)
            yield
            return
        phases.enter("wait")
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            phases.enter(phase)
            yield
        finally:
            os.close(handle)


def device_lock(folder: Path | None, device: int) -> DeviceLock:
    """Return the lock of a CUDA device, in a folder private to the user."""
    if folder is None:
        return DeviceLock(None)
    import torch

    name = f"cuda-{device}"
    with contextlib.suppress(AttributeError, RuntimeError, AssertionError):
        name = str(torch.cuda.get_device_properties(device).uuid)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return DeviceLock(folder / f"{name}.lock")
