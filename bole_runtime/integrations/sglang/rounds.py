"""What the families share: the rounds of an attention backend, the trees of a forward, the commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bole_runtime.integrations.engine_rounds import BatchRound, EnginePools, EngineRounds, RoundMemory
from bole_runtime.integrations.sglang.options import read_options
from bole_runtime.integrations.sglang.served import NotServed
from bole_runtime.state.geometry import LayerGeometry
from bole_runtime.tree import parents_from_links

_ROUNDS, _ROWS, _MEMORY = "_bole_rounds", "_bole_rows", "_bole_memory"

#: Makes the geometry of a layer and the pools of all layers, at the first verification.
Describe = Callable[[], "tuple[LayerGeometry, EnginePools]"]


class LayerRound(NamedTuple):
    """A layer in a round.

    Attributes:
        number: of the layer among the recurrent ones.
        current: what rounds of this many rows share.
        slots: of the rows; -1 marks a padding row.
    """

    number: int
    current: BatchRound
    slots: torch.Tensor


def layer_round(
    backend: Any, layer_id: int, spec_info: Any, rows: int, dtype: torch.dtype, describe: Describe
) -> LayerRound:
    """Return the round that a layer's target verification belongs to; the first layer takes the trees.

    Args:
        backend: SGLang's, of the recurrent layers.
        layer_id: SGLang's number of the layer.
        spec_info: of the forward batch.
        rows: requests, padding included.
        dtype: of q, k and v.
        describe: geometry and pools.

    Raises:
        NotServed: the trees of a backend have not always the same number of nodes, or there are states that Bole's
            commit does not know.
    """
    if getattr(spec_info, "ragged_verify_layout", None) is not None:
        raise NotServed(
            "the requests of a round have different numbers of draft tokens (SGLang's ragged verification), which "
            "Bole's plug-in does not serve; switch it off, or unset BOLE_SGLANG"
        )
    rounds: EngineRounds | None = getattr(backend, _ROUNDS, None)
    if rounds is None:
        rounds = _make(backend, spec_info, dtype, describe)
        setattr(backend, _ROUNDS, rounds)
    if spec_info.draft_token_num != rounds.nodes:
        raise NotServed(
            f"{spec_info.draft_token_num} draft tokens after {rounds.nodes} in one attention backend: Bole's plug-in "
            "serves trees whose size changes where each size has a backend of its own; unset BOLE_SGLANG"
        )
    current = rounds.batch(rows)
    metadata = backend.forward_metadata
    # A replayed graph runs no Python: its metadata is new, and has as many slots as the graph has rows.
    setattr(metadata, _ROWS, rows)
    slots = metadata.mamba_cache_indices[:rows]
    number = backend.req_to_token_pool.mamba_map[layer_id]
    if number == 0:
        # The layers of a forward share one tree, which the first one builds from the engine's links.
        links = metadata.retrieve_next_token, metadata.retrieve_next_sibling
        trees = None if links[0] is None else parents_from_links(links[0][:rows], links[1][:rows], slots)
        current.set_parents(trees)
    return LayerRound(number, current, slots)


def commit(original: Callable[..., Any], hybrid: Any, *args: Any, **arguments: Any) -> Any:
    """Around ``HybridLinearAttnBackend.update_mamba_state_after_mtp_verify``: states of the accepted paths."""
    backend = hybrid.linear_attn_backend
    rounds: EngineRounds | None = getattr(backend, _ROUNDS, None)
    if rounds is None:
        return original(hybrid, *args, **arguments)
    names = ("last_correct_step_indices", "mamba_track_indices", "mamba_steps_to_track")
    given = {**dict(zip(names, args, strict=False)), **arguments}
    accepted, tracked, steps = (given.get(name) for name in names)
    assert accepted is not None
    slots = backend.forward_metadata.mamba_cache_indices
    current = rounds.batch(getattr(backend.forward_metadata, _ROWS, slots.shape[0]))
    count = accepted.shape[0]
    if tracked is not None and steps is not None:
        targets = backend._translate_mamba_indices(tracked)
        current.commit_copies(slots[:count], targets[:count].to(slots.dtype), steps.to(slots.dtype))
    current.commit(slots[:count], accepted.to(slots.dtype))
    return None


def _make(backend: Any, spec_info: Any, dtype: torch.dtype, describe: Describe) -> EngineRounds:
    pool = backend.req_to_token_pool
    beside = [
        name for name in ("short_conv_pool", "ngram_pool") if getattr(getattr(pool, name, None), "enabled", False)
    ]
    if beside:
        raise NotServed(f"{', '.join(beside)}: states beside the recurrent ones, which Bole's plug-in does not commit")
    if any(getattr(pool.mamba_pool.mamba_cache, f"replayssm_{name}", None) is not None for name in ("g", "rawv")):
        raise NotServed("SGLang's ReplaySSM and Bole's plug-in replace the same thing; choose one")
    geometry, pools = describe()
    # Backends of other numbers of draft tokens work on the same pools, one after the other.
    memory: RoundMemory | None = getattr(pool, _MEMORY, None)
    if memory is None:
        memory = RoundMemory()
        setattr(pool, _MEMORY, memory)
    return EngineRounds(
        geometry,
        pools,
        nodes=spec_info.draft_token_num,
        # A node is no deeper than the drafter has steps; n-gram matches and block drafters say none.
        max_depth=getattr(spec_info, "spec_steps", spec_info.draft_token_num - 1),
        batch=max(pool.size, len(backend.state_indices_list)),
        dtype=dtype,
        precision=read_options().precision,
        memory=memory,
    )
