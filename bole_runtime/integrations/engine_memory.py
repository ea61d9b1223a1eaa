"""Factor buffers that rounds with different numbers of nodes take turns in."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bole_runtime.state.buffers import RoundBuffers
from bole_runtime.state.config import StateConfig

__all__ = ["RoundMemory"]


class RoundMemory:
    """Buffers of the largest round so far, of which smaller rounds take the first rows.

    An engine that changes how many nodes a request has keeps graphs of every number. A round's factors are committed
    before the next forward, so the graphs of all numbers can write the same memory: what is needed is the largest
    number of rows times nodes, not their sum. Rounds that are larger than all before take new buffers; the ones before
    keep theirs, which their graphs write.

    Attributes:
        bytes: of all buffers that were made.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._buffers: RoundBuffers | None = None
        self._total = 0
        self._kind: tuple[object, ...] | None = None

    @torch.inference_mode(False)  # tensors that live on are no inference tensors
    def take(self, total: int, make: Callable[[], StateConfig], device: torch.device) -> RoundBuffers:
        """Return buffers of at least ``total`` nodes in all.

        Args:
            total: nodes of all rows of a round.
            make: sizes of new buffers, asked for where those that are there are too small.
            device: of the pools.

        Raises:
            ValueError: see :meth:`check`.
        """
        if self._buffers is not None and total <= self._total:
            return self._buffers
        config = make()
        self.check(config, device)
        self._buffers, self._total = RoundBuffers(config, device), config.max_total
        self.bytes += sum(RoundBuffers.nbytes(config))
        return self._buffers

    def check(self, config: StateConfig, device: torch.device) -> None:
        """Refuse rounds whose factors are laid out in another way than those that share the buffers.

        Raises:
            ValueError: the layers, their dtype or the device differ.
        """
        kind = (tuple(config.layers), config.dtype, device)
        if self._kind is None:
            self._kind = kind
        if kind != self._kind:
            raise ValueError("memory: is shared by rounds of other layers, another dtype or another device")
