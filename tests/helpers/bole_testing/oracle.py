"""What a StateManager's slots must hold, in float64."""

from __future__ import annotations

import torch

from bole_runtime import StateManager


class Oracle:
    """States of every slot in float64, committed token by token."""

    def __init__(self, manager: StateManager) -> None:
        config = manager.config
        self.states = [torch.zeros(config.slots, *y.state_shape, dtype=torch.float64) for y in config.layers]
        self.convs = [
            torch.zeros(config.slots, y.channels, y.conv_width - 1, dtype=torch.float64) if y.conv_width else None
            for y in config.layers
        ]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """States and convolution states of every layer."""
        return [*self.states, *(c for c in self.convs if c is not None)]

    def reset(self, slot: int) -> None:
        """Zero a slot."""
        for t in self.tensors:
            t[slot] = 0

    def copy(self, target: int, source: int) -> None:
        """Copy a slot."""
        for t in self.tensors:
            t[target] = t[source]

    def save(self, slot: int) -> list[torch.Tensor]:
        """Return copies of a slot."""
        return [t[slot].clone() for t in self.tensors]

    def load(self, slot: int, saved: list[torch.Tensor]) -> None:
        """Write what :meth:`save` returned."""
        for t, value in zip(self.tensors, saved, strict=True):
            t[slot] = value
