"""Kimi Delta Attention layers of SGLang: verification of trees and chains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from bole_runtime.integrations.engine_rounds import EnginePools
from bole_runtime.integrations.sglang import seams
from bole_runtime.integrations.sglang.gdn import qkv_geometry, split_qkv
from bole_runtime.integrations.sglang.memory import pools_of
from bole_runtime.integrations.sglang.rounds import layer_round
from bole_runtime.integrations.sglang.served import NotServed
from bole_runtime.state.geometry import LayerGeometry

#: A sigmoid in fp32 that is 0 or 1 has no logit; this is less than its rounding next to 1.
_EDGE = 1e-7


@functools.cache
def write_gate_is_ready() -> bool:
    """Return whether the installed SGLang's model hands sigmoid(b) to a target verification instead of b.

    0.5.16 takes the sigmoid in every mode but decoding (``srt/models/kimi_linear.py``), and its verification kernel
    takes one again (``fused_sigmoid_gating_recurrent.py``). Its prefill and decoding take it once, and so does Bole.
    """
    return seams.mentions(seams.KIMI_FORWARD, "sigmoid")


def forward_extend(
    original: Callable[..., Any],
    backend: Any,
    layer: Any,
    forward_batch: Any,
    mixed_qkv: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    **more: Any,
) -> Any:
    """Around ``KDAAttnBackend.forward_extend``: a target verification is Bole's, everything else is as it was.

    Returns:
        [1, tokens, HV, dv], as the engine's own.

    Raises:
        NotServed: SGLang keeps the accepted states in its snapshots (fused accept of 0.5.23).
    """
    if getattr(backend, "accept_lens_pool", None) is not None:
        raise NotServed(
            "SGLang seeds its FlashInfer verification from the snapshots that Bole's plug-in leaves out; add "
            "--linear-attn-verify-backend triton, or unset BOLE_SGLANG"
        )
    if not forward_batch.forward_mode.is_target_verify():
        return original(backend, layer, forward_batch, mixed_qkv, a, b, **more)
    nodes = forward_batch.spec_info.draft_token_num

    def describe() -> tuple[LayerGeometry, EnginePools]:
        states, conv = pools_of(backend.req_to_token_pool)
        # KimiLinearStateShape (srt/configs/mamba_utils.py) has the window before the channels.
        return qkv_geometry("kda", layer), EnginePools(states, conv.transpose(-1, -2))

    rows = mixed_qkv.shape[0] // nodes
    number, current, slots = layer_round(
        backend, layer.layer_id, forward_batch.spec_info, rows, mixed_qkv.dtype, describe
    )
    x = mixed_qkv.unflatten(0, (rows, nodes))
    x = current.conv(number, x, layer.conv_weights, layer.bias, slots, "silu")  # whatever the layer says, as SGLang
    heads, dk = layer.num_v_heads, layer.head_k_dim
    b = b.reshape(rows, nodes, heads)
    gates: dict[str, torch.Tensor | float] = {
        "f": a.reshape(rows, nodes, heads, dk),  # [1, T, HV, dk], or with the last two as one
        "b": torch.logit(b.float(), eps=_EDGE) if write_gate_is_ready() else b,
        "A_log": layer.A_log.view(heads),  # [1, 1, HV, 1]
        "dt_bias": layer.dt_bias.view(heads, dk),
        "lower_bound": float(getattr(layer, "lower_bound", None) or 0.0),  # 0.5.23 on
    }
    out = current.verify(number, *split_qkv(layer, x), gates, slots)
    return out.flatten(0, 1).unsqueeze(0)
