"""Tensor-parallel shards on two GPUs, put together through NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bole_testing.shards import check_shards

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:bole")]


@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks_are_one(tmp_path: Path) -> None:
    check_shards(tmp_path, "nccl", 1e-5)
