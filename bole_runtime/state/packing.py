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


def _by_layer(saved: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> Sequence[torch.Tensor]:
    """Return one tensor a layer of what either class saved: a packed row, or that already."""
    if len(saved) != 1 or saved[0].dim() != 1:
        return saved
    made, at = [], 0
    for shape in shapes:
        size = torch.Size(shape).numel()
        made.append(saved[0][at : at + size].unflatten(0, shape))
        at += _rounded(size)
    return made


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
        """Write what :meth:`save` returned, or that of :class:`Separate` for the same shapes."""
        if len(saved) == 1 and saved[0].dim() == 1:
            self.base[slot].copy_(saved[0])
            return
        for view, value in zip(self.views, saved, strict=True):
            view[slot].copy_(value)


class Separate:
    """The same operations over tensors that the caller owns, one a layer, any slot stride."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self.views: tuple[torch.Tensor, ...] = tuple(views)

    @torch.inference_mode()
    def zero(self, slot: int) -> None:
        """Zero a slot of every layer."""
        for view in self.views:
            view[slot].zero_()

    @torch.inference_mode()
    def copy(self, target: int, source: int) -> None:
        """Copy a slot of every layer to another."""
        for view in self.views:
            view[target].copy_(view[source])

    def save(self, slot: int, device: torch.device) -> list[torch.Tensor]:
        """Return copies of a slot's rows, for :meth:`load`."""
        return [view[slot].detach().to(device, copy=True) for view in self.views]

    @torch.inference_mode()
    def load(self, slot: int, saved: Sequence[torch.Tensor]) -> None:
        """Write what :meth:`save` returned, or that of :class:`SlotMajor` for the same shapes."""
        values = _by_layer(saved, [tuple(view.shape[1:]) for view in self.views])
        for view, value in zip(self.views, values, strict=True):
            view[slot].copy_(value)
