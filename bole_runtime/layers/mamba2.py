"""A Mamba2 layer between its projections: what a fused front end has to give, operation by operation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bole_runtime.api import verify
from bole_runtime.conv import ConvPending, tree_conv
from bole_runtime.factors import PendingChain
from bole_runtime.layers.shared import LayerFactors, check_columns, check_parameter, check_sizes, live_rows
from bole_runtime.tree import TreeBatch


@dataclass(frozen=True, eq=False)
class Mamba2:
    """Parameters of a layer, as Mamba2, Nemotron-H, Granite 4, Bamba and Zamba2 have it: convolution and SiLU, step
    sizes, recurrence with skip, gated norm.

    The products before and after it (``in_proj``, ``out_proj``) are the caller's.

    Attributes:
        heads: HV.
        groups: HK, groups that share B and C; HV is a multiple of it.
        head_dim: P, the dv of the recurrence.
        state_size: N, the dk of the recurrence.
        conv_weight: [C, W] with C = HV P + 2 groups N: channels of x, B, C.
        conv_bias: [C] or None.
        A_log: [HV].
        dt_bias: [HV].
        D: [HV], of the skip term.
        norm_weight: [HV P].
        norm_groups: parts of the HV P columns that are normalised each for themselves.
        norm_eps: inside the root.
        dt_min: lower limit of the step size.
        dt_max: upper limit of the step size.
    """

    heads: int
    groups: int
    head_dim: int
    state_size: int
    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    D: torch.Tensor
    norm_weight: torch.Tensor
    norm_groups: int = 1
    norm_eps: float = 1e-6
    dt_min: float = 0.0
    dt_max: float = float("inf")

    def __post_init__(self) -> None:
        check_sizes(
            heads=self.heads,
            groups=self.groups,
            head_dim=self.head_dim,
            state_size=self.state_size,
            norm_groups=self.norm_groups,
        )
        if self.groups < 1 or self.heads < 1 or self.heads % self.groups:
            raise ValueError(f"heads: {self.heads} is not a positive multiple of groups = {self.groups}")
        if self.norm_groups < 1 or self.inner % self.norm_groups:
            raise ValueError(f"norm_groups: {self.norm_groups} does not divide HV P = {self.inner}")
        for name, size in (
            ("conv_weight", self.channels),
            ("A_log", self.heads),
            ("dt_bias", self.heads),
            ("D", self.heads),
            ("norm_weight", self.inner),
        ):
            check_parameter(name, getattr(self, name), size, vector=name != "conv_weight")
        if self.conv_bias is not None:
            check_parameter("conv_bias", self.conv_bias, self.channels)

    @property
    def inner(self) -> int:
        """HV P, columns of z and of x."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """C, channels of the convolution."""
        return self.inner + 2 * self.groups * self.state_size

    def verify(
        self,
        zxbcdt: torch.Tensor,
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
            zxbcdt: [B, N, columns] for a dense tree or [T, columns] for a packed one, the output of ``in_proj``: z, x,
                B, C and dt one after the other, HV P + C + HV columns. Nothing of it is copied.
            conv_state: pool [slots, C, L]; see :func:`~bole_runtime.tree_conv`.
            state: pool [slots, HV, P, N]; see :func:`~bole_runtime.verify`.
            slots: int32 or int64 [B]; -1 marks a padding row, whose output is zero.
            tree: topology and capacities.
            precision: ``lossless`` or ``fast``.
            conv_pending: raw inputs of accepted tokens that are not in the convolution state.
            pending: the same tokens for the recurrence.

        Returns:
            The input of ``out_proj``, [B, N, HV P] or [T, HV P] of the dtype of ``zxbcdt``, and the factors.

        Raises:
            TypeError: an argument has a wrong type or dtype.
            ValueError: a wrong shape, device, stride or value.
        """
        columns = [self.inner, self.channels, self.heads]
        check_columns("zxbcdt", zxbcdt, sum(columns))
        z, raw, dt = zxbcdt.split(columns, -1)
        mixed, conv = tree_conv(
            raw, self.conv_weight, self.conv_bias, state=conv_state, slots=slots, tree=tree, pending=conv_pending
        )
        size = self.groups * self.state_size
        x, b, c = mixed.split([self.inner, size, size], -1)
        out, factors = verify(
            c.unflatten(-1, (self.groups, self.state_size)),
            b.unflatten(-1, (self.groups, self.state_size)),
            x.unflatten(-1, (self.heads, self.head_dim)),
            gates={
                "dt_raw": dt,
                "A_log": self.A_log,
                "dt_bias": self.dt_bias,
                "D": self.D,
                "dt_min": self.dt_min,
                "dt_max": self.dt_max,
            },
            state=state,
            slots=slots,
            tree=tree,
            recurrence="mamba2",
            precision=precision,
            pending=pending,
        )
        live = live_rows(tree, slots, state.shape[0])
        return self.norm(out.flatten(-2), torch.where(live.unsqueeze(-1), z, 0)), LayerFactors(conv, factors)

    def norm(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Return RMSNorm(out * silu(z)) * weight, by groups of columns; rounded where the models round.

        Args:
            out: [..., HV P].
            z: of the shape of ``out``.
        """
        wide = torch.float64 if out.dtype is torch.float64 else torch.float32
        x = (out.to(wide) * torch.nn.functional.silu(z.to(wide))).unflatten(-1, (self.norm_groups, -1))
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.norm_eps)
        rounded: torch.Tensor = x.flatten(-2).to(out.dtype)
        return (self.norm_weight * rounded).to(out.dtype)
