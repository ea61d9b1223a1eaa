"""The error measure never lets a NaN pass."""

from __future__ import annotations

import math

import pytest
import torch

from bole_codegen.measure import poison_, relative_error


def test_frobenius() -> None:
    ref = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert relative_error(ref.clone(), ref) == 0.0
    assert relative_error(ref + torch.tensor([[0.0, 0.5], [0.0, 0.0]]), ref) == pytest.approx(0.1)


def test_differences_below_fp32_are_seen() -> None:
    ref = torch.full((4,), 1.0, dtype=torch.float64)
    assert relative_error(ref * (1 + 1e-12), ref) == pytest.approx(1e-12, rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_output_is_infinitely_wrong(bad: float) -> None:
    out = torch.ones(8)
    out[3] = bad
    assert relative_error(out, torch.ones(8)) == math.inf


def test_zero_reference_and_empty() -> None:
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0.0
    assert relative_error(torch.ones(3), torch.zeros(3)) == math.inf
    assert relative_error(torch.empty(0, 4), torch.empty(0, 4)) == 0.0
    assert relative_error(torch.tensor(2.0), torch.tensor(1.0)) == 1.0


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        relative_error(torch.zeros(3), torch.zeros(4))


def test_large_bf16_values_do_not_overflow() -> None:
    x = torch.full((16,), 3e38, dtype=torch.bfloat16)
    assert relative_error(x, x.double()) == 0.0


def test_poison_shows_in_the_error() -> None:
    out = poison_(torch.zeros(4, 2, dtype=torch.bfloat16))
    assert torch.isnan(out).all()
    out[:3] = 1.0
    assert relative_error(out, torch.ones(4, 2)) == math.inf
    assert poison_(torch.zeros(2, dtype=torch.int32)).tolist() == [-(2**31)] * 2
