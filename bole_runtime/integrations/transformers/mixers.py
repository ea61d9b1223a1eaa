"""Recurrent layers of transformers between their own projections, with convolution and recurrence from a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bole_runtime.state import LayerGeometry
from bole_runtime.state.round import Round


@dataclass(frozen=True)
class Mixer:
    """How Bole runs one class of layers.

    Attributes:
        geometry: of a module.
        forward: of a module, its geometry, a round, the layer's number in it, and hidden states [B, N, H].
        layout: of the recurrent states that the module leaves in a cache, ``dk_dv`` or ``dv_dk``.
    """

    geometry: Callable[[Any], LayerGeometry]
    forward: Callable[[Any, LayerGeometry, Round, int, torch.Tensor], torch.Tensor]
    layout: str = "dk_dv"


def _conv(module: Any, rnd: Round, n: int, raw: torch.Tensor) -> torch.Tensor:
    return rnd.conv(n, raw, module.conv1d.weight.squeeze(1), module.conv1d.bias)


def _heads(mixed: torch.Tensor, geometry: LayerGeometry) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys, values = geometry.key_heads * geometry.dk, geometry.value_heads * geometry.dv
    q, k, v = mixed.split((keys, keys, values), -1)
    return q.unflatten(-1, (-1, geometry.dk)), k.unflatten(-1, (-1, geometry.dk)), v.unflatten(-1, (-1, geometry.dv))


# Gated DeltaNet

#: Raw inputs of the convolution [B, N, C], z of any shape, b and a [B, N, HV].
Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _by_key_heads(module: Any, hidden: torch.Tensor) -> Projected:
    made = module.fix_query_key_value_ordering(module.in_proj_qkvz(hidden), module.in_proj_ba(hidden))
    q, k, v, z, b, a = made
    return torch.cat([t.flatten(2) for t in (q, k, v)], -1), z, b, a


def _by_parts(module: Any, hidden: torch.Tensor) -> Projected:
    return module.in_proj_qkv(hidden), module.in_proj_z(hidden), module.in_proj_b(hidden), module.in_proj_a(hidden)


def _gdn_geometry(module: Any) -> LayerGeometry:
    heads = module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim
    return LayerGeometry(*heads, gate_mode="raw", conv_width=module.conv_kernel_size)


def _gdn(project: Callable[[Any, torch.Tensor], Projected]) -> Mixer:
    def forward(module: Any, geometry: LayerGeometry, rnd: Round, n: int, hidden: torch.Tensor) -> torch.Tensor:
        raw, z, b, a = project(module, hidden)
        q, k, v = _heads(_conv(module, rnd, n, raw), geometry)
        out = rnd.verify(n, q, k, v, gates={"a": a, "b": b, "A_log": module.A_log, "dt_bias": module.dt_bias})
        normed = module.norm(out.reshape(-1, geometry.dv), z.reshape(-1, geometry.dv))
        made: torch.Tensor = module.out_proj(normed.reshape(*hidden.shape[:-1], -1))
        return made

    return Mixer(_gdn_geometry, forward)


# Kimi Delta Attention


def _kda_geometry(module: Any) -> LayerGeometry:
    heads = module.num_heads, module.num_heads, module.head_dim, module.head_dim
    return LayerGeometry(*heads, recurrence="kda", gate_mode="raw", conv_width=module.conv_kernel_size)


def _kda(module: Any, geometry: LayerGeometry, rnd: Round, n: int, hidden: torch.Tensor) -> torch.Tensor:
    raw = torch.cat((module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)), -1)
    q, k, v = _heads(_conv(module, rnd, n, raw), geometry)
    gate = module.forget_gate
    f = gate.f_b_proj(gate.f_a_proj(hidden)).unflatten(-1, (-1, geometry.dk))
    rates = {"A_log": gate.A_log.flatten(), "dt_bias": gate.dt_bias.view(-1, geometry.dk)}
    out = rnd.verify(n, q, k, v, gates={"f": f, "b": module.b_proj(hidden), **rates})
    z = module.g_b_proj(module.g_a_proj(hidden)).unflatten(-1, (-1, geometry.dv))
    made: torch.Tensor = module.o_proj(module.o_norm(out, z).flatten(-2))
    return made


# Mamba2


def _mamba2_geometry(module: Any) -> LayerGeometry:
    heads = module.n_groups, module.num_heads, module.ssm_state_size, module.head_dim
    return LayerGeometry(*heads, recurrence="mamba2", gate_mode="raw", conv_width=module.conv_kernel_size)


def _mamba2(module: Any, geometry: LayerGeometry, rnd: Round, n: int, hidden: torch.Tensor) -> torch.Tensor:
    z, raw, dt = module.in_proj(hidden).split((module.intermediate_size, module.conv_dim, module.num_heads), -1)
    size = geometry.key_heads * geometry.dk
    x, b, c = _conv(module, rnd, n, raw).split((module.intermediate_size, size, size), -1)
    # The model limits step sizes in prefill and not in decoding, which is what a round does.
    gates = {"dt_raw": dt, "A_log": module.A_log, "dt_bias": module.dt_bias, "D": module.D}
    out = rnd.verify(
        n,
        c.unflatten(-1, (-1, geometry.dk)),
        b.unflatten(-1, (-1, geometry.dk)),
        x.unflatten(-1, (-1, geometry.dv)),
        gates=gates,
    )
    made: torch.Tensor = module.out_proj(module.norm(out.flatten(-2), z).to(hidden.dtype))
    return made


#: Recurrent layers by the name of their class.
RECURRENT: dict[str, Mixer] = {
    "Qwen3NextGatedDeltaNet": _gdn(_by_key_heads),
    "Qwen3_5GatedDeltaNet": _gdn(_by_parts),
    "Qwen3_5MoeGatedDeltaNet": _gdn(_by_parts),
    "KimiLinearDeltaAttention": Mixer(_kda_geometry, _kda),
    "NemotronHMamba2Mixer": Mixer(_mamba2_geometry, _mamba2, layout="dv_dk"),
}
#: Attention layers that take a mask as it is given to them.
ATTENTION = (
    "Qwen3NextAttention",
    "Qwen3_5Attention",
    "Qwen3_5MoeAttention",
    "KimiLinearAttention",
    "NemotronHAttention",
)
#: What may take a layer's place and looks at one token at a time.
POINTWISE = ("NemotronHMLP", "NemotronHMoE")
