"""Against the convolution that transformers' Qwen3-Next decodes with, token by token along every path."""

from __future__ import annotations

import random

import pytest
import torch
from bole_testing.cases.base import random_parents
from bole_testing.close import assert_close, assert_same_bits
from bole_testing.conv import conv_tree

from bole_runtime import conv_commit, tree_conv

modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
update = getattr(modeling, "causal_conv1d_update", None) or modeling.torch_causal_conv1d_update


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)])
@pytest.mark.parametrize("bias", [False, True])
def test_every_path(dtype: torch.dtype, bound: float, bias: bool) -> None:
    # In bf16, transformers rounds between the convolution and SiLU and tree_conv does not: both round at the end.
    rng, gen = random.Random(4), torch.Generator().manual_seed(4)
    nodes, channels, width = 12, 24, 4
    tree = conv_tree([random_parents(rng, nodes)], False)
    x = torch.randn(1, nodes, channels, generator=gen).to(dtype)
    weight = torch.randn(channels, width, generator=gen).to(dtype)
    offset = torch.randn(channels, generator=gen).to(dtype) if bias else None
    pool = torch.randn(2, channels, width, generator=gen).to(dtype)  # transformers keeps W inputs
    slots = torch.tensor([1])
    before = pool.clone()
    out, factors = tree_conv(x, weight, offset, state=pool, slots=slots, tree=tree)
    assert_same_bits("state", pool, before)
    states = []
    for node in range(nodes):
        state = pool[1:2].clone()
        for step in tree.path(0, node):
            want = update(x[:, step, :, None], state, weight, offset, "silu")
        assert_close(f"node {node}", out[0, node].float(), want[0, :, 0].float(), bound)
        states.append(state)
    for node in (0, nodes // 2, nodes - 1):
        committed = pool.clone()
        conv_commit(committed, slots, factors, torch.tensor([node]))
        assert_same_bits(f"state at {node}", committed[1:2], states[node])
