"""Lifetime of a round: factors of every node of the batch, in buffers made once for the capacity of a whole batch.

And lifetime of a layer's call: scratch memory that every layer uses after the other.
"""

from __future__ import annotations

import torch

from bole_runtime.conv import ConvFactors
from bole_runtime.factors import Factors
from bole_runtime.state.config import StateConfig
from bole_runtime.state.geometry import LayerGeometry
from bole_runtime.state.layout import token_layout
from bole_runtime.tree import TreeBatch

#: Rows are rounded up to this, so that every layer's buffers start at 16-byte addresses.
_ROWS = 16


def round_rows(total: int) -> int:
    """Return the rows that buffers for ``total`` nodes have."""
    return -(-total // _ROWS) * _ROWS


class RoundBuffers:
    """Factor buffers of all layers, overwritten by every round."""

    def __init__(self, config: StateConfig, device: torch.device) -> None:
        rows = round_rows(config.max_total)
        self._layers: list[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]] = []
        self._inputs: list[torch.Tensor | None] = []
        groups: dict[LayerGeometry, list[int]] = {}
        for n, layer in enumerate(config.layers):
            groups.setdefault(layer, []).append(n)
        placed: dict[int, tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], torch.Tensor | None]] = {}
        for layer, members in groups.items():
            made = token_layout(layer, config.dtype)
            count = len(members)

            def new(shape: tuple[int, ...], dtype: torch.dtype, count: int = count) -> torch.Tensor:
                return torch.zeros(count, rows, *shape, dtype=dtype, device=device)

            k, v = new(made.k, made.dtype), new(made.v, made.dtype)
            gates = {name: new(shape, made.gate_dtype) for name, shape in made.gates}
            inputs = new((layer.channels,), config.dtype) if layer.conv_width else None
            for i, n in enumerate(members):
                own = {name: t[i] for name, t in gates.items()}
                placed[n] = (k[i], v[i], own, None if inputs is None else inputs[i])
        for n in range(len(config.layers)):
            k_rows, v_rows, gate_rows, input_rows = placed[n]
            self._layers.append((k_rows, v_rows, gate_rows))
            self._inputs.append(input_rows)

    @staticmethod
    def nbytes(config: StateConfig) -> tuple[int, int]:
        """Bytes of the factors and of the convolutions' raw inputs."""
        rows = round_rows(config.max_total)
        factors = sum(token_layout(layer, config.dtype).nbytes for layer in config.layers)
        inputs = sum(layer.channels for layer in config.layers) * config.dtype.itemsize
        return factors * rows, inputs * rows

    def factors(self, layer: int, geometry: LayerGeometry, dtype: torch.dtype, tree: TreeBatch) -> Factors:
        """Return the buffers of a layer as factors of a tree."""
        k, v, gates = self._layers[layer]
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
        inputs = self._inputs[layer]
        return None if inputs is None else ConvFactors(_rows_of(inputs, tree), geometry.conv_width, tree)


def _rows_of(buffer: torch.Tensor, tree: TreeBatch) -> torch.Tensor:
    return buffer[: tree.max_total].unflatten(0, tree.lead) if not tree.is_packed else buffer[: tree.max_total]


class LayerScratch:
    """Scratch memory of one call, shared by all layers because they run one after the other.

    A buffer that turned out too small is kept: a captured graph may still use it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in self._buffers)

    def reserve(self, elements: int) -> torch.Tensor | None:
        """Return fp32 memory of at least this many elements; None for none."""
        if elements == 0:
            return None
        if not self._buffers or self._buffers[-1].numel() < elements:
            self._buffers.append(torch.empty(elements, dtype=torch.float32, device=self._device))
        return self._buffers[-1]
