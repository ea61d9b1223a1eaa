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


def test_only_the_token_drawn_last_may_be_a_neighbour() -> None:
    wanted = [torch.tensor([[0, 1, -1]]), torch.tensor([[5, 900, -1]]), torch.tensor([2]), torch.tensor([0])]

    def changed(index: int, value: list[int]) -> list[torch.Tensor]:
        return [torch.tensor([value]).view_as(t) if i == index else t for i, t in enumerate(wanted)]

    assert bench_sampling.same_results(wanted, wanted, False)
    near = changed(1, [5, 884, -1])
    assert bench_sampling.same_results(near, wanted, True)
    assert not bench_sampling.same_results(near, wanted, False)
    for index, value in ((1, [5, 883, -1]), (1, [6, 900, -1]), (1, [5, 900, 3]), (0, [0, 2, -1]), (2, [1]), (3, [1])):
        assert not bench_sampling.same_results(changed(index, value), wanted, True), (index, value)
    # A token that the walk went on with decides about the rest.
    assert not bench_sampling.same_results(changed(1, [5, -1, -1]), wanted, True)


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
