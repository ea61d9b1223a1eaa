"""The recurrent geometry of one released model, whole and per tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ShardedGeometry:
    """What one rank holds of a recurrent layer.

    Attributes:
        hk: key heads of this rank.
        hv: value heads of this rank.
        dk: key head dimension.
        dv: value head dimension.
        tp: number of ranks the model is split over.
    """

    hk: int
    hv: int
    dk: int
    dv: int
    tp: int

    @property
    def group(self) -> int:
        """Value heads a key head."""
        return self.hv // self.hk


@dataclass(frozen=True)
class ModelPreset:
    """One released model.

    Attributes:
        name: the model's name as released (``Qwen3.5-9B``).
        family: recurrence family (``gdn``, ``kda``, ``mamba2``, ...); Bole has kernels for some of them only.
        layers: all layers of the model.
        recurrent_layers: layers that carry a recurrent state.
        hk: key heads (Mamba2: groups of B and C); None where the family has no such geometry.
        hv: value heads (Mamba2: heads of x).
        dk: key head dimension (Mamba2: state size N).
        dv: value head dimension (Mamba2: head size P).
        gate: how the model computes its gates: formulas as text, ranges, per head or channel.
        state_dtype: element type of the recurrent state, ``fp32``, ``bf16`` or ``fp16``.
        state_dtype_known: whether a source states it; the usual ``fp32`` is assumed otherwise.
        conv_width: width of the short causal convolution; None without one.
        conv_channels: its channels, of the whole model: one number, several where layers differ, none without one.
        conv_state_dtype: element type of its state; where no source states it, that of the weights.
        raw: the whole record, with its sources and which fields are stated, defaulted or derived.
    """

    name: str
    family: str
    layers: int
    recurrent_layers: int
    hk: int | None
    hv: int | None
    dk: int | None
    dv: int | None
    gate: Mapping[str, Any]
    state_dtype: str
    state_dtype_known: bool
    conv_width: int | None
    conv_channels: tuple[int, ...]
    conv_state_dtype: str
    raw: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def beta_scale(self) -> float:
        """Factor on sigmoid(b) in the write gate: 2.0 where the model lets beta reach 2, else 1.0."""
        upper = (self.gate.get("beta_range") or [0, 1])[1]
        return float(upper)

    @property
    def sources(self) -> tuple[str, ...]:
        """Where the figures come from."""
        return tuple(self.raw.get("sources", ()))

    def tp_sizes(self) -> tuple[int, ...]:
        """Return every tensor-parallel size that gives each rank whole key and value heads."""
        if self.hk is None or self.hv is None:
            return ()
        hk, hv = self.hk, self.hv
        return tuple(tp for tp in range(1, min(hk, hv) + 1) if hk % tp == 0 and hv % tp == 0)

    def shard(self, tp: int = 1) -> ShardedGeometry:
        """Return the geometry of one of ``tp`` ranks; heads are split evenly, head dimensions stay whole.

        Raises:
            ValueError: the family has no head geometry, or the heads do not divide by ``tp``.
        """
        if self.hk is None or self.hv is None or self.dk is None or self.dv is None:
            raise ValueError(f"{self.name} ({self.family}) has no key and value heads to split")
        if tp not in self.tp_sizes():
            sizes = ", ".join(map(str, self.tp_sizes()))
            raise ValueError(
                f"tp = {tp} does not divide the heads of {self.name} (HK {self.hk}, HV {self.hv}); "
                f"sizes that do: {sizes}"
            )
        return ShardedGeometry(hk=self.hk // tp, hv=self.hv // tp, dk=self.dk, dv=self.dv, tp=tp)
