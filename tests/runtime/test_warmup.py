"""warmup() prepares nothing where nothing is compiled, and says what it refuses."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"key_heads": 2, "value_heads": 3}, ValueError, "value_heads: 3 is no multiple of key_heads, 2"),
        ({"dk": 0}, ValueError, "dk"),
        ({"max_batch": 0}, ValueError, "max_batch"),
        ({"max_batch": 2.5}, TypeError, "max_batch"),
        ({"max_nodes": 600}, ValueError, "max_nodes"),
        ({"max_depth": 9, "max_nodes": 4}, ValueError, "max_depth"),
        ({"layers": 0}, ValueError, "layers"),
        ({"dtype": torch.int8}, TypeError, "dtype: torch.int8 is not allowed"),
        ({"dtype": "bf16"}, TypeError, "dtype: 'bf16' is not allowed"),
        ({"index_dtype": torch.float32}, TypeError, "index_dtype: torch.float32 is not allowed; allowed: torch.int32,"),
        ({"index_dtype": None}, TypeError, "index_dtype: None is not allowed"),
        ({"gate_dtype": "x"}, TypeError, "gate_dtype: 'x' is not allowed"),
        ({"gate_dtype": torch.int32}, TypeError, "gate_dtype: torch.int32 is not allowed"),
        ({"precision": ()}, ValueError, "precision: expected at least one profile, got none; known: fast, lossless"),
        ({"precision": None}, TypeError, "precision: expected a profile"),
        ({"precision": (["fast"],)}, ValueError, r"precision: \['fast'\] is unknown"),
        ({"packed": "no"}, TypeError, "packed: expected a bool, got str"),
        ({"captured": 1}, TypeError, "captured: expected a bool, got int"),
        ({"progress": "print"}, TypeError, "progress: expected a function"),
        ({"device": "cuda:99"}, ValueError, "device: 'cuda:99' is no CUDA device of this machine"),
        ({"device": "meta"}, ValueError, "device: 'meta' is not allowed"),
        ({"device": "bogus"}, ValueError, "device: 'bogus' is not allowed"),
        ({"device": 3.5}, TypeError, "device: expected a torch.device"),
        ({"precision": ("fast", "bogus")}, ValueError, "precision: 'bogus' is unknown; known: fast, lossless"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        warmup(**{**geometry(), "device": "cpu", **change})


def test_gates_may_be_fp64() -> None:
    assert warmup(**geometry(gate_dtype=torch.float64, dtype=torch.float64), device="cpu").checked == []


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
