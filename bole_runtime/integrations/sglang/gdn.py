"""Gated DeltaNet layers of SGLang: verification of trees and chains, and the commit after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bole_runtime.integrations.engine_rounds import EnginePools, EngineRounds
from bole_runtime.integrations.sglang.memory import pools_of
from bole_runtime.integrations.sglang.options import read_options
from bole_runtime.state.geometry import LayerGeometry
from bole_runtime.tree import parents_from_links

_ROUNDS = "_bole_rounds"


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
    nodes = forward_batch.spec_info.draft_token_num
    rows = mixed_qkv.shape[0] // nodes
    rounds = _rounds_of(backend, layer, forward_batch.spec_info, mixed_qkv.dtype)
    current = rounds.batch(rows)
    metadata = backend.forward_metadata
    slots = metadata.mamba_cache_indices[:rows]
    number = backend.req_to_token_pool.mamba_map[layer.layer_id]
    if number == 0:
        # The layers of a forward share one tree, which the first one builds from the engine's links.
        links = metadata.retrieve_next_token, metadata.retrieve_next_sibling
        trees = None if links[0] is None else parents_from_links(links[0][:rows], links[1][:rows], slots)
        current.set_parents(trees)
    x = mixed_qkv.unflatten(0, (rows, nodes))
    x = current.conv(number, x, layer.conv_weights, layer.bias, slots, layer.activation)
    q, k, v = x.split((layer.q_dim, layer.k_dim, layer.v_dim), dim=-1)
    gates = {
        "a": a.unflatten(0, (rows, nodes)),
        "b": b.unflatten(0, (rows, nodes)),
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
    }
    out = current.verify(
        number,
        q.unflatten(-1, (layer.num_q_heads, layer.head_q_dim)),
        k.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)),
        v.unflatten(-1, (layer.num_v_heads, layer.head_v_dim)),
        gates,
        slots,
    )
    return out.flatten(0, 1).unsqueeze(0)


def commit(original: Callable[..., Any], hybrid: Any, *args: Any, **arguments: Any) -> Any:
    """Around ``HybridLinearAttnBackend.update_mamba_state_after_mtp_verify``: states of the accepted paths."""
    backend = hybrid.linear_attn_backend
    rounds: EngineRounds | None = getattr(backend, _ROUNDS, None)
    if rounds is None:
        return original(hybrid, *args, **arguments)
    names = ("last_correct_step_indices", "mamba_track_indices", "mamba_steps_to_track")
    given = {**dict(zip(names, args, strict=False)), **arguments}
    accepted, tracked, steps = (given.get(name) for name in names)
    slots = backend.forward_metadata.mamba_cache_indices
    current = rounds.batch(slots.shape[0])
    count = accepted.shape[0]  # type: ignore[union-attr]
    if tracked is not None and steps is not None:
        targets = backend._translate_mamba_indices(tracked)
        current.commit_copies(slots[:count], targets[:count].to(slots.dtype), steps.to(slots.dtype))
    current.commit(slots[:count], accepted.to(slots.dtype))  # type: ignore[union-attr]
    return None


def _rounds_of(backend: Any, layer: Any, spec_info: Any, dtype: torch.dtype) -> EngineRounds:
    """Return the rounds of an attention backend, made at its first verification."""
    rounds: EngineRounds | None = getattr(backend, _ROUNDS, None)
    if rounds is None:
        states, conv = pools_of(backend.req_to_token_pool)
        geometry = LayerGeometry(
            key_heads=layer.num_k_heads,
            value_heads=layer.num_v_heads,
            dk=layer.head_k_dim,
            dv=layer.head_v_dim,
            gate_mode="raw",
            conv_width=layer.conv_weights.shape[-1],
        )
        rounds = EngineRounds(
            geometry,
            EnginePools(states, conv),
            nodes=spec_info.draft_token_num,
            # A node is no deeper than the drafter has steps.
            max_depth=spec_info.spec_steps,
            batch=max(backend.req_to_token_pool.size, len(backend.state_indices_list)),
            dtype=dtype,
            precision=read_options().precision,
        )
        setattr(backend, _ROUNDS, rounds)
    return rounds
