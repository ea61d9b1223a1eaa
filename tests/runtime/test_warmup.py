"""warmup() prepares nothing where nothing is compiled, and says what it refuses."""

from __future__ import annotations

import pytest
import torch

from bole_runtime import warmup


def geometry(**changes: object) -> dict[str, object]:
    return {"key_heads": 1, "value_heads": 2, "dk": 16, "dv": 16, "max_batch": 2, "max_nodes": 5, **changes}


def test_torch_backend_needs_no_kernels() -> None:
    report = warmup(**geometry(), device="cpu")
    assert report.checked == []
    assert report.failed == []


def test_unknown_family_is_named() -> None:
    with pytest.raises(ValueError, match="mamba1"):
        warmup(**geometry(), recurrence="mamba1", device="cpu")


@pytest.mark.gpu
def test_every_batch_is_ready_for_capture() -> None:
    lines: list[str] = []
    report = warmup(
        key_heads=2, value_heads=4, dk=128, dv=128, max_batch=5, max_nodes=9, precision=("fast", "lossless"),
        layers=3, progress=lines.append,
    )  # fmt: skip
    assert [p.op for p, _, _ in report.checked].count("commit") == 8, "batches 1, 2, 4, 5 in two profiles"
    assert all(error < 3e-3 for _, _, error in report.checked)
    assert len(lines) == 8
    assert torch.cuda.is_available()
