"""What a recurrent layer of a model looks like to the state manager, and a tensor-parallel rank's share of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bole_runtime.families import RecurrenceSpec, get_family


@dataclass(frozen=True)
class LayerGeometry:
    """One recurrent layer.

    Attributes:
        key_heads: HK.
        value_heads: HV, a multiple of HK.
        dk: key head dimension.
        dv: value head dimension.
        recurrence: family name or spec.
        gate_mode: gate mode of the layer's calls. It decides what is kept of a node for families whose gates are stored
            as given; no other looks at it.
        conv_width: W of the short convolution in front of the recurrence, or 0 for a layer without one.
        conv_channels: C of that convolution; 0 means q, k and v together, ``2 * HK * dk + HV * dv``.
    """

    key_heads: int
    value_heads: int
    dk: int
    dv: int
    recurrence: str | RecurrenceSpec = "gdn"
    gate_mode: str = "ready"
    conv_width: int = 0
    conv_channels: int = 0

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "dk", "dv", "conv_width", "conv_channels"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
            if value < 1 and not name.startswith("conv_"):
                raise ValueError(f"{name}: {value} is not allowed; allowed: 1 or more")
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads: {self.value_heads} is not a multiple of key_heads = {self.key_heads}")
        if self.conv_width and not 2 <= self.conv_width <= 8:
            raise ValueError(f"conv_width: {self.conv_width} is not allowed; allowed: 0 (none), 2 to 8")
        if self.conv_channels < 0 or (self.conv_channels and not self.conv_width):
            raise ValueError(f"conv_channels: {self.conv_channels} is not allowed with conv_width = {self.conv_width}")
        spec = self.spec
        if self.gate_mode not in spec.modes:
            raise ValueError(
                f"gate_mode: {self.gate_mode!r} is not allowed for {spec.name!r}; allowed: {', '.join(spec.modes)}"
            )

    @property
    def spec(self) -> RecurrenceSpec:
        """The family."""
        return self.recurrence if isinstance(self.recurrence, RecurrenceSpec) else get_family(self.recurrence)

    @property
    def channels(self) -> int:
        """Channels of the convolution; 0 without one."""
        if not self.conv_width:
            return 0
        return self.conv_channels or 2 * self.key_heads * self.dk + self.value_heads * self.dv

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """HV, dv, dk of one slot."""
        return self.value_heads, self.dv, self.dk

    def shard(self, world: int) -> LayerGeometry:
        """Return one rank's share when the heads are split evenly over ``world`` ranks.

        Rank r holds key heads ``r * HK / world`` onward and the value heads that read them, so a rank needs nothing of
        the others: each has a manager of its own, and no state is ever exchanged.

        Raises:
            TypeError: no int.
            ValueError: the heads, or the channels, do not divide.
        """
        if not isinstance(world, int) or isinstance(world, bool):
            raise TypeError(f"world: expected an int, got {type(world).__name__}")
        if world < 1 or self.key_heads % world:
            raise ValueError(f"world: {world} ranks cannot share {self.key_heads} key heads evenly")
        if self.conv_channels % world:
            raise ValueError(f"world: {world} ranks cannot share {self.conv_channels} convolution channels evenly")
        return replace(
            self,
            key_heads=self.key_heads // world,
            value_heads=self.value_heads // world,
            conv_channels=self.conv_channels // world,
        )


def shard_heads(tensor: torch.Tensor, dim: int, rank: int, world: int) -> torch.Tensor:
    """Return the heads of one rank, a view: those of :meth:`LayerGeometry.shard`.

    Args:
        tensor: anything with a dimension of key or value heads.
        dim: that dimension.
        rank: 0 to ``world - 1``.
        world: ranks.

    Raises:
        ValueError: a rank outside the world, or heads that do not divide.
    """
    heads = tensor.shape[dim]
    if not 0 <= rank < world or heads % world:
        raise ValueError(f"rank, world: rank {rank} of {world} cannot take an even share of {heads} heads")
    return tensor.narrow(dim, rank * (heads // world), heads // world)


def shard_channels(tensor: torch.Tensor, dim: int, geometry: LayerGeometry, rank: int, world: int) -> torch.Tensor:
    """Return the convolution channels (q, k, v, each by head) of one rank, as a new tensor.

    Args:
        tensor: anything with a dimension of the channels q, k, v of the whole layer.
        dim: that dimension.
        geometry: of the whole layer.
        rank: 0 to ``world - 1``.
        world: ranks.

    Raises:
        ValueError: another number of channels than q, k and v have, or heads that do not divide.
    """
    parts = (geometry.key_heads * geometry.dk,) * 2 + (geometry.value_heads * geometry.dv,)
    if tensor.shape[dim] != sum(parts):
        raise ValueError(f"tensor: {tensor.shape[dim]} channels in dimension {dim}, expected q, k and v: {sum(parts)}")
    return torch.cat([shard_heads(part, dim, rank, world) for part in tensor.split(parts, dim)], dim)


def check_layers(layers: Sequence[LayerGeometry]) -> tuple[LayerGeometry, ...]:
    """Return the layers of a model as a tuple.

    Raises:
        TypeError: not a list or tuple of LayerGeometry.
        ValueError: there is none.
    """
    if isinstance(layers, LayerGeometry) or not isinstance(layers, (list, tuple)):
        raise TypeError(f"layers: expected a list or tuple of LayerGeometry, got {type(layers).__name__}")
    for n, layer in enumerate(layers):
        if not isinstance(layer, LayerGeometry):
            raise TypeError(f"layers[{n}]: expected a LayerGeometry, got {type(layer).__name__}")
    if not layers:
        raise ValueError("layers: there must be at least one")
    return tuple(layers)
