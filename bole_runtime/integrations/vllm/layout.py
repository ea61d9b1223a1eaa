"""Pages of vLLM's KV cache that hold a recurrent layer's state, seen as Bole's pools without a copy.

A page holds the convolution's inputs and then the recurrent state, packed, with padding up to the page size that all
layers of the model share. A block number names one page in every layer of a KV cache group, so it is a slot of Bole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bole_runtime.integrations.engine_rounds import EnginePools
from bole_runtime.state.geometry import LayerGeometry
from bole_runtime.validate import not_a

CONV_ORDERS = ("SD", "DS")


@dataclass(frozen=True)
class PageLayout:
    """What one page holds.

    Attributes:
        layer: geometry of the layer, of this rank; HV, dv and dk of Mamba2 are heads, head size and state size.
        drafts: tokens that vLLM drafts a request (N): its convolution state has N columns more than the window.
        state_dtype: of the recurrent state.
        conv_dtype: of the convolution state.
        conv_order: ``SD`` (columns, then channels; vLLM's default) or ``DS``.
    """

    layer: LayerGeometry
    drafts: int = 0
    state_dtype: torch.dtype = torch.float32
    conv_dtype: torch.dtype = torch.bfloat16
    conv_order: str = "SD"

    def __post_init__(self) -> None:
        if not isinstance(self.drafts, int) or isinstance(self.drafts, bool):
            not_a("drafts", self.drafts, "an int")
        if self.drafts < 0:
            raise ValueError(f"drafts: {self.drafts} is not allowed; allowed: 0 or more")
        if self.conv_order not in CONV_ORDERS:
            raise ValueError(f"conv_order: {self.conv_order!r} is not allowed; allowed: {', '.join(CONV_ORDERS)}")

    @property
    def window(self) -> int:
        """Columns that the convolution reads, W - 1; 0 without one."""
        return max(self.layer.conv_width - 1, 0)

    @property
    def columns(self) -> int:
        """Columns of the convolution state, W - 1 + N; 0 without one."""
        return self.window + self.drafts if self.window else 0

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes in the order of the page: the convolution state, if there is one, and the recurrent state."""
        conv = (self.columns, self.layer.channels)
        shape = conv if self.conv_order == "SD" else conv[::-1]
        return (shape, self.layer.state_shape) if self.window else (self.layer.state_shape,)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Element types of :attr:`shapes`."""
        return (self.conv_dtype, self.state_dtype) if self.window else (self.state_dtype,)

    @property
    def nbytes(self) -> int:
        """Bytes of a page that are in use."""
        return sum(torch.Size(s).numel() * t.itemsize for s, t in zip(self.shapes, self.dtypes, strict=True))

    def split(self, pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """View the raw pages of one layer as vLLM's states: what its layers call ``kv_cache``.

        Args:
            pages: int8 or uint8 [blocks, bytes] or [blocks, 1, 1, bytes], the bytes contiguous; any block stride.

        Returns:
            One view [blocks, *shape] for each of :attr:`shapes`.

        Raises:
            TypeError: no tensor, or of another type.
            ValueError: a wrong shape, too few bytes, or bytes that are not contiguous.
        """
        if not isinstance(pages, torch.Tensor):
            not_a("pages", pages, "a torch.Tensor")
        if pages.dtype not in (torch.int8, torch.uint8):
            raise TypeError(f"pages: dtype {pages.dtype} is not allowed; allowed: torch.int8, torch.uint8")
        if pages.dim() == 4 and pages.shape[1:3] == (1, 1):
            pages = pages[:, 0, 0]
        if pages.dim() != 2 or pages.shape[1] < self.nbytes or pages.stride(1) != 1:
            raise ValueError(
                f"pages: expected [blocks, bytes] with {self.nbytes} contiguous bytes or more, got shape "
                f"{tuple(pages.shape)} with strides {pages.stride()}"
            )
        views, at = [], 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            size = torch.Size(shape).numel() * dtype.itemsize
            views.append(pages[:, at : at + size].view(dtype).unflatten(1, shape))
            at += size
        return tuple(views)


@dataclass(frozen=True)
class GroupPools:
    """The layers of one KV cache group: they share block numbers, those of another group do not.

    Attributes:
        layout: of a page.
        states: [layers, blocks, HV, dv, dk].
        columns: [layers, blocks, C, W - 1 + N], oldest input first, or None.
    """

    layout: PageLayout
    states: torch.Tensor
    columns: torch.Tensor | None

    @classmethod
    def bind(cls, layout: PageLayout, caches: Sequence[Sequence[torch.Tensor]]) -> GroupPools:
        """View the bound states of a group's layers as pools.

        Args:
            layout: of a page.
            caches: one a layer, in the order of the group: what :meth:`PageLayout.split` gives, or ``kv_cache`` of
                vLLM's layers.

        Raises:
            TypeError: no list or tuple, or other element types.
            ValueError: there is no layer, shapes do not fit, or layers are not equally spaced in one allocation.
        """
        if not isinstance(caches, (list, tuple)):
            not_a("caches", caches, "a list or tuple with one entry a layer")
        if not caches:
            raise ValueError("caches: there must be at least one layer")
        for n, cache in enumerate(caches):
            # A page of more parts is another thing: vLLM's ReplaySSM keeps rings behind the states.
            if len(cache) != len(layout.shapes):
                raise ValueError(f"caches[{n}]: expected {len(layout.shapes)} states, got {len(cache)}")
            for t, shape, dtype in zip(cache, layout.shapes, layout.dtypes, strict=True):
                if t.dtype != dtype:
                    raise TypeError(f"caches[{n}]: expected {dtype}, got {t.dtype}")
                if tuple(t.shape[1:]) != shape:
                    raise ValueError(f"caches[{n}]: expected [blocks, {shape}], got shape {tuple(t.shape)}")
        columns = None
        if layout.window:
            columns = _stacked([cache[0] for cache in caches])
            columns = columns.transpose(2, 3) if layout.conv_order == "SD" else columns
        return cls(layout, _stacked([cache[-1] for cache in caches]), columns)

    @property
    def windows(self) -> torch.Tensor | None:
        """The columns that hold a window while one token counts as accepted: [layers, blocks, C, W - 1]."""
        return None if self.columns is None else self.columns[..., : self.layout.window]

    @property
    def engine(self) -> EnginePools:
        """The pools of :class:`~bole_runtime.integrations.engine_rounds.EngineRounds`."""
        return EnginePools(self.states, self.windows)


def _stacked(layers: list[torch.Tensor]) -> torch.Tensor:
    first = layers[0]
    if len(layers) == 1:
        return first.unsqueeze(0)
    step = layers[1].storage_offset() - first.storage_offset()
    for n, t in enumerate(layers):
        same = t.shape == first.shape and t.stride() == first.stride() and t.device == first.device
        if (
            not same
            or t.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or t.storage_offset() != first.storage_offset() + n * step
            or step <= 0
        ):
            raise ValueError(
                f"caches[{n}]: the layers of a group must be equally spaced in one allocation and in its order; those "
                "of different groups lie over one another and have block numbers of their own"
            )
    return first.as_strided((len(layers), *first.shape), (step, *first.stride()), first.storage_offset())
