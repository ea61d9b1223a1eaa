"""Tensor-parallel shards: two processes with half of the heads each, against one with all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bole_testing.shards import LAYER, check_shards

from bole_runtime import LayerGeometry
from bole_runtime.state import shard_channels, shard_heads


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_ranks_are_one(tmp_path: Path) -> None:
    check_shards(tmp_path, "gloo", 1e-6)


def test_shards_of_a_geometry() -> None:
    model = LayerGeometry(16, 32, 128, 128, conv_width=4)
    half = model.shard(2)
    assert (half.key_heads, half.value_heads, half.channels) == (8, 16, model.channels // 2)
    assert model.shard(1) == model
    heads = torch.arange(12).reshape(2, 6)
    assert shard_heads(heads, 1, 1, 3).tolist() == [[2, 3], [8, 9]]
    channels = torch.arange(LAYER.channels)
    parts = [shard_channels(channels, 0, LAYER, rank, 2).tolist() for rank in range(2)]
    assert parts[1] == [*range(8, 16), *range(24, 32), *range(48, 64)]
    assert sorted(parts[0] + parts[1]) == channels.tolist()


def test_refused() -> None:
    with pytest.raises(ValueError, match="world: 3 ranks cannot share 2 key heads evenly"):
        LAYER.shard(3)
    with pytest.raises(ValueError, match="world: 0 ranks"):
        LAYER.shard(0)
    with pytest.raises(ValueError, match="cannot share 9 convolution channels"):
        LayerGeometry(2, 4, 8, 8, conv_width=4, conv_channels=9).shard(2)
    with pytest.raises(ValueError, match="rank 2 of 2 cannot take an even share of 4 heads"):
        shard_heads(torch.zeros(4), 0, 2, 2)
    with pytest.raises(ValueError, match="tensor: 9 channels in dimension 0, expected q, k and v: 64"):
        shard_channels(torch.zeros(9), 0, LAYER, 0, 2)
