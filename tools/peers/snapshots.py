"""The states that a serial tree kernel keeps: one of every node of every request."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from bole_codegen.measure import VerifyInputs, Workload, poison_
from peers.base import PeerUnavailable, PreparedPeer

#: Snapshots are spread over this much memory where it fits, so that they are as cold as a pool of many layers.
COLD_BYTES = 256 << 20


def buffer_bytes(work: Workload) -> int:
    """Return the bytes of one buffer, with the row that takes the padded requests of a real batch."""
    return work.snapshot_bytes // work.batch * (work.batch + 1)


def buffers_that_fit(work: Workload, layers: int, budget: int) -> int:
    """Return how many buffers keep snapshots cold within a budget.

    Raises:
        PeerUnavailable: not even one fits.
    """
    one = buffer_bytes(work)
    if one > budget:
        raise PeerUnavailable(f"snapshots need {one / 1e9:.1f} GB, {budget / 1e9:.1f} GB are free")
    return max(1, min(layers, -(-COLD_BYTES // one), budget // one))


class Snapshots:
    """Buffers ``[B + 1, N, HV, dv, dk]`` in the state's dtype; layers take turns with them.

    Row i belongs to request i.

    Attributes:
        rows: int32 ``[B]``, the row of each request.
        buffers: the buffers.
    """

    def __init__(self, inputs: VerifyInputs, count: int) -> None:
        """Allocate ``count`` buffers."""
        work, device = inputs.workload, inputs.parents.device
        self.rows = torch.arange(work.batch, dtype=torch.int32, device=device)
        shape = (work.batch + 1, work.nodes, work.hv, work.dv, work.dk)
        self.buffers = [
            torch.empty(shape, dtype=inputs.layers[0].state.dtype, device=device) for _ in range(max(1, count))
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of one buffer."""
        return self.buffers[0].numel() * self.buffers[0].element_size()

    def of(self, layer: int) -> Tensor:
        """Return the buffer of a layer."""
        return self.buffers[layer % len(self.buffers)]

    def poison(self) -> None:
        """Fill with NaN: a node that reads its parent's before it is written then shows."""
        for buffer in self.buffers:
            poison_(buffer)


class SnapshotPeer(ABC):
    """A peer whose kernel keeps snapshots. What it was loaded from lives as long as it does."""

    profile = "fast"
    includes = "verify, a state snapshot a node"
    commits = False

    def __init__(self, name: str, version: str) -> None:
        """Name it."""
        self.name, self.version = name, version
        #: Triton may read the source again while it compiles.
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def memory_bytes(self, work: Workload) -> int:
        """Bytes of one snapshot buffer with its padding row."""
        return buffer_bytes(work)

    def prepare(self, inputs: VerifyInputs, shape: str, scratch_budget: int) -> PreparedPeer:
        """Bind to inputs, with as many snapshot buffers as keep them cold within the budget.

        Raises:
            PeerUnavailable: not even one buffer fits.
        """
        buffers = buffers_that_fit(inputs.workload, len(inputs.layers), scratch_budget)
        return self.bind(inputs, shape == "chain", buffers)

    @abstractmethod
    def bind(self, inputs: VerifyInputs, chain: bool, buffers: int) -> PreparedPeer:
        """Bind to inputs; a chain carries no parents."""


def private_folder() -> tuple[tempfile.TemporaryDirectory[str], Path]:
    """Return a folder for a wheel's file: a shared temporary path could be prepared by someone else."""
    folder = tempfile.TemporaryDirectory(prefix="bole-peer-")
    return folder, Path(folder.name)
