"""Lifetime of a round: factors of every node of the batch, in buffers made once for the capacity of a whole batch.

And lifetime of a layer's call: scratch memory that every layer uses after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from bole_runtime.backends.scratch import allocate
from bole_runtime.conv import ConvFactors
from bole_runtime.factors import Factors
from bole_runtime.state.config import StateConfig
from bole_runtime.state.geometry import LayerGeometry
from bole_runtime.state.layout import token_layout
from bole_runtime.tree import TreeBatch


class _LayerBuffers(NamedTuple):
    """Rows of one layer: keys, values, gates, and the convolution's raw inputs where there is one."""

    k: torch.Tensor
    v: torch.Tensor
    gates: dict[str, torch.Tensor]
    inputs: torch.Tensor | None


class RoundBuffers:
    """Factor buffers of all layers, overwritten by every round."""

    def __init__(self, config: StateConfig, device: torch.device) -> None:
        rows = config.max_total
        self._layers: list[_LayerBuffers] = []
        for layer in config.layers:
            made = token_layout(layer, config.dtype)

            def new(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
                return torch.zeros(rows, *shape, dtype=dtype, device=device)

            self._layers.append(
                _LayerBuffers(
                    new(made.k, made.dtype),
                    new(made.v, made.dtype),
                    {name: new(shape, made.gate_dtype) for name, shape in made.gates},
                    new((layer.channels,), config.dtype) if layer.conv_width else None,
                )
            )

    @staticmethod
    def nbytes(config: StateConfig) -> tuple[int, int]:
        """Bytes of the factors and of the convolutions' raw inputs."""
        rows = config.max_total
        factors = sum(token_layout(layer, config.dtype).nbytes for layer in config.layers)
        inputs = sum(layer.channels for layer in config.layers) * config.dtype.itemsize
        return factors * rows, inputs * rows

    def factors(self, layer: int, geometry: LayerGeometry, dtype: torch.dtype, tree: TreeBatch) -> Factors:
        """Return the buffers of a layer as factors of a tree."""
        k, v, gates, _ = self._layers[layer]
        return Factors(
            spec=geometry.spec,
            gate_mode=token_layout(geometry, dtype).mode,
            k=_rows_of(k, tree),
            v=_rows_of(v, tree),
            gates={name: _rows_of(t, tree) for name, t in gates.items()},
            beta_scale=1.0,
            qk_l2norm=geometry.spec.qk_l2norm,
            tree=tree,
        )

    def conv_factors(self, layer: int, geometry: LayerGeometry, tree: TreeBatch) -> ConvFactors | None:
        """Return the buffer of a layer's convolution inputs as factors of a tree."""
        inputs = self._layers[layer].inputs
        return None if inputs is None else ConvFactors(_rows_of(inputs, tree), geometry.conv_width, tree)


def _rows_of(buffer: torch.Tensor, tree: TreeBatch) -> torch.Tensor:
    return buffer[: tree.max_total].unflatten(0, tree.lead) if not tree.is_packed else buffer[: tree.max_total]


class LayerScratch:
    """Scratch memory of one call, shared by all layers because they run one after the other.

    What the call that takes most needs is there from the start, so that the memory plan is exact. Only choices that
    change later (tables, entries that ``warmup`` checked) can ask for more. The buffer that was too small is then kept,
    because a captured graph may still use it, and counts.
    """

    def __init__(self, device: torch.device, elements: int) -> None:
        self._device = device
        self._buffers = [allocate(elements, device)] if elements else []

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in self._buffers)

    def reserve(self, elements: int) -> torch.Tensor | None:
        """Return fp32 memory of at least this many elements; None for none."""
        if elements == 0:
            return None
        if not self._buffers or self._buffers[-1].numel() < elements:
            self._buffers.append(allocate(elements, self._device))
        return self._buffers[-1]
