"""Gated DeltaNet layers of SGLang: verification of trees and chains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bole_runtime.integrations.engine_rounds import EnginePools
from bole_runtime.integrations.sglang.memory import pools_of
from bole_runtime.integrations.sglang.rounds import layer_round
from bole_runtime.state.geometry import LayerGeometry


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
    """Around ``GDNAttnBackend.forward_extend``: a target verification is Bole's, everything else is as it was.

    Returns:
        [1, tokens, HV, dv], as the engine's own.
    """
    if not forward_batch.forward_mode.is_target_verify():
        return original(backend, layer, forward_batch, mixed_qkv, a, b, **more)

    def describe() -> tuple[LayerGeometry, EnginePools]:
        states, conv = pools_of(backend.req_to_token_pool)
        return qkv_geometry("gdn", layer), EnginePools(states, conv)

    nodes = forward_batch.spec_info.draft_token_num
    rows = mixed_qkv.shape[0] // nodes
    number, current, slots = layer_round(
        backend, layer.layer_id, forward_batch.spec_info, rows, mixed_qkv.dtype, describe
    )
    x = mixed_qkv.unflatten(0, (rows, nodes))
    x = current.conv(number, x, layer.conv_weights, layer.bias, slots, layer.activation)
    gates = {
        "a": a.unflatten(0, (rows, nodes)),
        "b": b.unflatten(0, (rows, nodes)),
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
    }
    out = current.verify(number, *split_qkv(layer, x), gates, slots)
    return out.flatten(0, 1).unsqueeze(0)


def qkv_geometry(family: str, layer: Any) -> LayerGeometry:
    """Return the geometry of a ``RadixLinearAttention`` with one convolution over q, k and v."""
    return LayerGeometry(
        key_heads=layer.num_k_heads,
        value_heads=layer.num_v_heads,
        dk=layer.head_k_dim,
        dv=layer.head_v_dim,
        recurrence=family,
        gate_mode="raw",
        conv_width=layer.conv_weights.shape[-1],
    )


def split_qkv(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the columns of a ``RadixLinearAttention`` into heads of q, k and v."""
    q, k, v = x.split((layer.q_dim, layer.k_dim, layer.v_dim), dim=-1)
    return (
        q.unflatten(-1, (layer.num_q_heads, layer.head_q_dim)),
        k.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)),
        v.unflatten(-1, (layer.num_v_heads, layer.head_v_dim)),
    )
