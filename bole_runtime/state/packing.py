"""Tensors of all layers in one buffer, a slot's rows side by side: one copy moves a whole request."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Elements that every layer's part is rounded up to, so that its pointer and strides stay divisible for wide loads.
ALIGN = 16


def _rounded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def packed_width(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the elements of one slot: every layer's part, rounded up."""
    return sum(_rounded(torch.Size(shape).numel()) for shape in shapes)


class SlotMajor:
    """A zero-filled buffer [slots, width] and one view [slots, *shape] a layer.

    Attributes:
        base: the buffer.
        views: one a layer, with the slot stride of the whole buffer.
    """

    def __init__(self, slots: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self.base = torch.zeros(slots, packed_width(shapes), dtype=dtype, device=device)
        self.views: tuple[torch.Tensor, ...] = tuple(self._views(shapes))

    def _views(self, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        views, at = [], 0
        for shape in shapes:
            size = torch.Size(shape).numel()
            views.append(self.base[:, at : at + size].unflatten(1, shape))
            at += _rounded(size)
        return views

    def zero(self, slot: int) -> None:
        """Zero a slot of every layer."""
        self.base[slot].zero_()

    def copy(self, target: int, source: int) -> None:
        """Copy a slot of every layer to another."""
        self.base[target].copy_(self.base[source])

    def save(self, slot: int, device: torch.device) -> list[torch.Tensor]:
        """Return copies of a slot's rows, for :meth:`load`."""
        return [self.base[slot].to(device, copy=True)]

    def load(self, slot: int, saved: Sequence[torch.Tensor]) -> None:
        """Write what :meth:`save` returned."""
        self.base[slot].copy_(saved[0])


class Separate:
    """The same operations over tensors that the caller owns, one a layer, any slot stride."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self.views: tuple[torch.Tensor, ...] = tuple(views)

    def zero(self, slot: int) -> None:
        """Zero a slot of every layer."""
        for view in self.views:
            view[slot].zero_()

    def copy(self, target: int, source: int) -> None:
        """Copy a slot of every layer to another."""
        for view in self.views:
            view[target].copy_(view[source])

    def save(self, slot: int, device: torch.device) -> list[torch.Tensor]:
        """Return copies of a slot's rows, for :meth:`load`."""
        return [view[slot].to(device, copy=True) for view in self.views]

    def load(self, slot: int, saved: Sequence[torch.Tensor]) -> None:
        """Write what :meth:`save` returned."""
        for view, value in zip(self.views, saved, strict=True):
            view[slot].copy_(value)
