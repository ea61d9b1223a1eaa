"""Rounds of several numbers of nodes in one memory: states as token by token, and no more memory than the largest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bole_testing import sglang_layers
from bole_testing.close import assert_close, assert_same_bits
from bole_testing.sglang import LAYER_IDS, make_backend, refuse, walk

from bole_runtime import LayerGeometry
from bole_runtime.integrations.engine_rounds import EnginePools, EngineRounds, RoundMemory
from bole_runtime.integrations.sglang import rounds as sglang_rounds

#: By number of nodes: parents, and SGLang's links.
TREES = {
    1: ((-1,), (-1,), (-1,)),
    3: ((-1, 0, 0), (1, -1, -1), (-1, 2, -1)),
    5: ((-1, 0, 0, 1, 2), (1, 3, 4, -1, -1), (-1, 2, -1, -1, -1)),
    7: ((-1, 0, 0, 0, 1, 1, 4), (1, 4, -1, -1, 6, -1, -1), (-1, 2, 3, -1, 5, -1, -1)),
}


def batch_of(backend: Any, slots: torch.Tensor, nodes: int) -> Any:
    rows = slots.shape[0]
    _, child, sibling = TREES[nodes]
    backend.forward_metadata = SimpleNamespace(
        mamba_cache_indices=slots, num_decodes=rows,
        retrieve_next_token=torch.tensor([child] * rows, dtype=torch.int32),
        retrieve_next_sibling=torch.tensor([sibling] * rows, dtype=torch.int32),
    )  # fmt: skip
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: True),
        spec_info=SimpleNamespace(draft_token_num=nodes, spec_steps=3),
    )


@pytest.mark.parametrize("kind", ["gdn", "mamba2"])
def test_the_number_of_nodes_changes_from_round_to_round(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    layers = [sglang_layers.make(kind) for _ in LAYER_IDS]
    one = layers[0]
    first = make_backend(torch.randn(2, 6, *one.states), torch.randn(2, 6, one.channels, 3))
    # As SGLang: every number of draft tokens has an attention backend of its own over the same pools.
    backends = {7: first, **{n: SimpleNamespace(**vars(first)) for n in (1, 3, 5)}}
    cache = first.req_to_token_pool.mamba_pool.mamba_cache
    states, pools = cache.temporal, cache.conv[0]
    taken = []
    for turn, nodes in enumerate((7, 3, 3, 7, 5, 1, 3, 5, 1, 7)):
        monkeypatch.setattr(sglang_layers, "NODES", nodes)
        slots = ([4, 2], [4, 2], [1, -1])[turn % 3]
        live = [b for b, slot in enumerate(slots) if slot >= 0]
        backend = backends[nodes]
        batch = batch_of(backend, torch.tensor(slots, dtype=torch.int32), nodes)
        accepted = [(turn + 2) % nodes, nodes - 1][: len(live)]
        want = []
        for n, (layer_id, layer) in enumerate(zip(LAYER_IDS, layers, strict=True)):
            raw = layer.draw(len(slots))
            out, after, kept = walk(
                states[n], pools[n], raw, TREES[nodes][0], slots, layer.weight, layer.bias, layer.step()
            )  # fmt: skip
            got = layer.forward(backend, layer_id, batch)
            assert_close(f"turn {turn} output", got, layer.finish(out), 5e-6)
            new, window = states[n].clone(), pools[n].clone()
            for b in live:
                new[slots[b]], window[slots[b]] = after[b][accepted[b]].float(), kept[b][accepted[b]].float()
            want.append((new, window))
        hybrid = SimpleNamespace(linear_attn_backend=backend)
        sglang_rounds.commit(refuse, hybrid, last_correct_step_indices=torch.tensor(accepted))
        for n, (new, window) in enumerate(want):
            assert_close(f"turn {turn} states", states[n], new.double(), 2e-6)
            assert_same_bits(f"turn {turn} windows", pools[n], window)
        taken.append(backend._bole_rounds.bytes)
    assert len(set(taken)) == 1  # the first, largest round made all there is


def rounds_of(nodes: int, memory: RoundMemory, dtype: torch.dtype = torch.float32) -> EngineRounds:
    layer = LayerGeometry(1, 2, 8, 8, gate_mode="raw", conv_width=4)
    pools = EnginePools(torch.zeros(1, 4, 2, 8, 8), torch.zeros(1, 4, layer.channels, 3))
    return EngineRounds(layer, pools, nodes=nodes, max_depth=3, batch=2, dtype=dtype, memory=memory)


def test_memory_is_that_of_the_largest_round() -> None:
    memory = RoundMemory()
    large, small = rounds_of(8, memory), rounds_of(4, memory)
    large.batch(2)
    assert large.bytes == small.bytes > 0
    before = memory.bytes
    small.batch(4)  # as many nodes in all
    assert memory.bytes == before
    assert small.batch(4).factors[0].k.data_ptr() == large.batch(2).factors[0].k.data_ptr()
    kept = large.batch(2).factors[0].k.data_ptr()
    small.batch(5)  # more than there are: new ones, and captured rounds keep theirs
    assert memory.bytes == before + before * 20 // 16
    assert large.batch(2).factors[0].k.data_ptr() == kept
    assert large.batch(1).factors[0].k.data_ptr() != kept


def test_memory_of_other_layers_is_refused() -> None:
    memory = RoundMemory()
    rounds_of(4, memory)
    with pytest.raises(ValueError, match="memory: is shared by rounds of other layers"):
        rounds_of(4, memory, torch.bfloat16)
    with pytest.raises(TypeError, match="memory: expected a RoundMemory or None"):
        rounds_of(4, "plenty")  # type: ignore[arg-type]
