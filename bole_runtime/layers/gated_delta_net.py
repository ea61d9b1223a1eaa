"""A Gated DeltaNet layer between its projections: what a fused front end has to give, operation by operation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bole_runtime.api import verify
from bole_runtime.conv import ConvPending, tree_conv
from bole_runtime.factors import PendingChain
from bole_runtime.layers.shared import LayerFactors, check_columns, check_parameter, check_sizes, live_rows
from bole_runtime.tree import TreeBatch

#: How a packed projection orders its columns: whole parts one after the other (Qwen3.5), or the parts of a key head
#: with the value heads that read it, head by head (Qwen3-Next).
LAYOUTS: tuple[str, ...] = ("parts", "key_heads")


@dataclass(frozen=True, eq=False)
class GatedDeltaNet:
    """Parameters of a layer, as Qwen3-Next and Qwen3.5 have it: convolution and SiLU, gates, recurrence, gated norm.

    The products before and after it (``in_proj``, ``out_proj``) are the caller's.

    Attributes:
        key_heads: HK.
        value_heads: HV, a multiple of HK.
        dk: key head dimension.
        dv: value head dimension.
        conv_weight: [C, W] with C = 2 HK dk + HV dv: channels of q, k, v.
        A_log: [HV].
        dt_bias: [HV].
        norm_weight: [dv].
        conv_bias: [C] or None.
        norm_eps: inside the root.
        layout: of the projections' columns, one of :data:`LAYOUTS`. ``parts``: q, k, v, z and b, a.
        norm_gate: activation of z, ``silu`` or ``sigmoid``.
    """

    key_heads: int
    value_heads: int
    dk: int
    dv: int
    conv_weight: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    conv_bias: torch.Tensor | None = None
    norm_eps: float = 1e-6
    layout: str = "parts"
    norm_gate: str = "silu"

    def __post_init__(self) -> None:
        check_sizes(key_heads=self.key_heads, value_heads=self.value_heads, dk=self.dk, dv=self.dv)
        if self.key_heads < 1 or self.value_heads < 1 or self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads: {self.value_heads} is not a positive multiple of key_heads = {self.key_heads}"
            )
        for name, allowed in (("layout", LAYOUTS), ("norm_gate", ("silu", "sigmoid"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not allowed; allowed: {', '.join(allowed)}")
        for name, size in (
            ("conv_weight", self.channels),
            ("A_log", self.value_heads),
            ("dt_bias", self.value_heads),
            ("norm_weight", self.dv),
        ):
            check_parameter(name, getattr(self, name), size, vector=name != "conv_weight")
        if self.conv_bias is not None:
            check_parameter("conv_bias", self.conv_bias, self.channels)

    @property
    def key_dim(self) -> int:
        """Columns of q, and of k."""
        return self.key_heads * self.dk

    @property
    def value_dim(self) -> int:
        """Columns of v, and of z."""
        return self.value_heads * self.dv

    @property
    def channels(self) -> int:
        """C, channels of the convolution."""
        return 2 * self.key_dim + self.value_dim

    def split(
        self, qkvz: torch.Tensor, ba: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the raw inputs of the convolution [..., C], z [..., HV, dv], and the gate inputs b and a [..., HV].

        Views with the layout ``parts``; copies of q, k and v with ``key_heads``.

        Args:
            qkvz: output of the packed projection, [..., C + HV dv].
            ba: output of the packed projection of the gates, [..., 2 HV].

        Raises:
            ValueError: a wrong number of columns.
        """
        for name, tensor, columns in (("qkvz", qkvz, self.channels + self.value_dim), ("ba", ba, 2 * self.value_heads)):
            check_columns(name, tensor, columns)
        if self.layout == "parts":
            x, z = qkvz.split([self.channels, self.value_dim], -1)
            b, a = ba.split(self.value_heads, -1)
            return x, z.unflatten(-1, (self.value_heads, self.dv)), b, a
        group = self.value_heads // self.key_heads
        heads = qkvz.unflatten(-1, (self.key_heads, -1))
        parts = heads.split([self.dk, self.dk, group * self.dv, group * self.dv], -1)
        q, k, v, z = (part.flatten(-2) for part in parts)
        b, a = (part.flatten(-2) for part in ba.unflatten(-1, (self.key_heads, -1)).split(group, -1))
        return torch.cat((q, k, v), -1), z.unflatten(-1, (self.value_heads, self.dv)), b, a

    def verify(
        self,
        qkvz: torch.Tensor,
        ba: torch.Tensor,
        *,
        conv_state: torch.Tensor,
        state: torch.Tensor,
        slots: torch.Tensor,
        tree: TreeBatch,
        precision: str = "lossless",
        conv_pending: ConvPending | None = None,
        pending: PendingChain | None = None,
    ) -> tuple[torch.Tensor, LayerFactors]:
        """Run all nodes of all trees through the layer. Neither state is written; no host sync on a device.

        Args:
            qkvz: [B, N, C + HV dv] for a dense tree or [T, C + HV dv] for a packed one, the output of the projection.
            ba: [B, N, 2 HV] or [T, 2 HV].
            conv_state: pool [slots, C, L]; see :func:`~bole_runtime.tree_conv`.
            state: pool [slots, HV, dv, dk]; see :func:`~bole_runtime.verify`.
            slots: int32 or int64 [B]; -1 marks a padding row, whose output is zero.
            tree: topology and capacities.
            precision: ``lossless`` or ``fast``.
            conv_pending: raw inputs of accepted tokens that are not in the convolution state.
            pending: the same tokens for the recurrence.

        Returns:
            The input of ``out_proj``, [B, N, HV dv] or [T, HV dv] of the dtype of ``qkvz``, and the factors.

        Raises:
            TypeError: an argument has a wrong type or dtype.
            ValueError: a wrong shape, device, stride or value.
        """
        raw, z, b, a = self.split(qkvz, ba)
        x, conv = tree_conv(
            raw, self.conv_weight, self.conv_bias, state=conv_state, slots=slots, tree=tree, pending=conv_pending
        )
        q, k, v = x.split([self.key_dim, self.key_dim, self.value_dim], -1)
        out, factors = verify(
            q.unflatten(-1, (self.key_heads, self.dk)),
            k.unflatten(-1, (self.key_heads, self.dk)),
            v.unflatten(-1, (self.value_heads, self.dv)),
            gates={"a": a, "b": b, "A_log": self.A_log, "dt_bias": self.dt_bias},
            state=state,
            slots=slots,
            tree=tree,
            recurrence="gdn",
            precision=precision,
            pending=pending,
        )
        live = live_rows(tree, slots, state.shape[0])
        return self.norm(out, torch.where(live[..., None, None], z, 0)).flatten(-2), LayerFactors(conv, factors)

    def norm(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Return RMSNorm(out) * weight * act(z) over dv, rounded where the models round: before the weight, at the end.

        Args:
            out: [..., HV, dv].
            z: of the shape of ``out``.
        """
        wide = torch.float64 if out.dtype is torch.float64 else torch.float32
        x = out.to(wide)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.norm_eps)
        gate = torch.nn.functional.silu(z.to(wide)) if self.norm_gate == "silu" else torch.sigmoid(z.to(wide))
        return (self.norm_weight * x.to(out.dtype) * gate).to(out.dtype)
