"""The benchmark of trees, allocation and acceptance: its checks run without a GPU, its times do not."""

from __future__ import annotations

from pathlib import Path

import bench_sampling
import pytest
import torch

SMALL = ["--batch", "1,3", "--nodes", "8", "--vocabulary", "300", "--check-only"]


def test_check_only_compares_every_operation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_sampling.main([*SMALL, "--csv", str(tmp_path / "out.csv")]) == 0
    text = capsys.readouterr().out
    for name in ("tree from parents", "packed tree from links", "allocate", "greedy", "top-k", "rejection"):
        assert text.count(name) >= 2, name
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert lines[0] == "batch,nodes,operation,check"
    assert len(lines) == 15


def test_a_wrong_result_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(1000))
    monkeypatch.setattr(
        bench_sampling, "allocate", lambda p, s, b, t: bench_sampling_allocate(p, s, b - next(count) % 2, t)
    )
    from bole_runtime.budget import allocate as bench_sampling_allocate

    assert bench_sampling.main(SMALL) == 1
    assert "WRONG" in capsys.readouterr().out


def test_walks_are_some_nodes_long() -> None:
    for operation in bench_sampling.operations(4, 16, 300, torch.float32):
        if operation.visited is not None:
            launch, made = operation.make("cpu", 1)
            launch()
            assert made[2].float().mean() > 1.5, operation.name
            assert operation.visited(made) >= float(made[2].sum()) * 300 * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_there_is_nothing_to_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_sampling.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
