"""What is kept of one token of a layer: the shapes that factor buffers and rings share, taken from the family."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from bole_runtime.factors import Factors
from bole_runtime.state.geometry import LayerGeometry
from bole_runtime.state.packing import packed_width
from bole_runtime.tree import TreeBatch


@dataclass(frozen=True)
class TokenLayout:
    """Factors of one token.

    Attributes:
        mode: gate mode of what is kept.
        k: HK, dk.
        v: HV, dv.
        gates: name to shape, all of ``gate_dtype``.
        dtype: of k and v.
        gate_dtype: of the gates.
    """

    mode: str
    k: tuple[int, ...]
    v: tuple[int, ...]
    gates: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: torch.dtype
    gate_dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one token."""
        data = torch.Size(self.k).numel() + torch.Size(self.v).numel()
        gates = sum(torch.Size(shape).numel() for _, shape in self.gates)
        return data * self.dtype.itemsize + gates * self.gate_dtype.itemsize

    def ring_shapes(self, capacity: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return the shapes of one slot's ring: k and v, and the gates."""
        return [(capacity, *self.k), (capacity, *self.v)], [(capacity, *shape) for _, shape in self.gates]

    def ring_nbytes(self, capacity: int) -> int:
        """Bytes of one slot's ring."""
        data, gates = self.ring_shapes(capacity)
        return packed_width(data) * self.dtype.itemsize + packed_width(gates) * self.gate_dtype.itemsize


@functools.lru_cache(maxsize=256)
def token_layout(layer: LayerGeometry, dtype: torch.dtype) -> TokenLayout:
    """Return what is kept of one token of a layer."""
    like = _allocate(layer, dtype)
    kinds = {t.dtype for t in like.gates.values()}
    assert len(kinds) <= 1
    return TokenLayout(
        like.gate_mode,
        tuple(like.k.shape[1:]),
        tuple(like.v.shape[1:]),
        tuple((name, tuple(t.shape[1:])) for name, t in like.gates.items()),
        dtype,
        kinds.pop() if kinds else torch.float32,
    )


def _allocate(layer: LayerGeometry, dtype: torch.dtype) -> Factors:
    return Factors.allocate(
        TreeBatch(1, 1, max_total=1),
        key_heads=layer.key_heads,
        value_heads=layer.value_heads,
        dk=layer.dk,
        dv=layer.dv,
        dtype=dtype,
        recurrence=layer.spec,
        gate_mode=layer.gate_mode,
        device="meta",
    )
