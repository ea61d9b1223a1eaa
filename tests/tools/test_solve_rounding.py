"""The model of a solve's rounding that docs/performance.md takes its errors from."""

from __future__ import annotations

import math
import sys

import pytest
import solve_rounding
import torch


@pytest.mark.parametrize("nodes", [8, 16, 64])
def test_every_solver_is_finite_and_as_exact_as_its_operands(nodes: int) -> None:
    for name, correlation, beta in solve_rounding.CASES:
        found = dict(zip(solve_rounding.WAYS, solve_rounding.errors(nodes, correlation, beta, 0), strict=True))
        assert all(math.isfinite(e) for e in found.values()), (name, found)
        assert found["inverse", "fp32"] < 1e-6
        assert found["neumann", "fp16x2"] < 1e-6, name
        # Substitution is off by no more than the inverse in operands of as many bits.
        assert found["neumann", "fp16"] < 1.1 * found["inverse", "fp16"], name


def test_columns_that_are_not_settled_leave_the_range_of_fp16_without_a_cut() -> None:
    erase = torch.full((64, 64), 2.0).tril(-1)
    reads = torch.ones(64, 64).tril()
    assert solve_rounding.neumann(reads, erase, "fp16").isfinite().all()
    x = reads
    for _ in range(8):
        x = reads - x @ erase
    assert x.abs().max() > 60000


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["solve_rounding.py", "--nodes", "4"])
    solve_rounding.main()
    out = capsys.readouterr().out
    assert "one key, beta 2" in out
    assert "nan" not in out
    monkeypatch.setattr(sys, "argv", ["solve_rounding.py", "--nodes", "3"])
    with pytest.raises(SystemExit):
        solve_rounding.main()
    assert "--nodes: 3" in capsys.readouterr().err
