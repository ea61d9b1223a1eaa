"""The search's check of commits on keys that nearly repeat, on interpreted kernels: what passes, and what does not."""

from __future__ import annotations

import pytest
import torch

from bole_codegen.search.case import CheckCase
from bole_codegen.search.near_keys import NearKeys
from bole_codegen.search.results import CandidateError
from bole_runtime import Config, set_backend
from bole_runtime.backends.triton_backend.select import limits_of
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.variants import get_variant

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]

LOSSLESS = Problem("commit", "gdn", 32, 16, 1, "fp32", "fp32", "ready", "lossless", 16, 16, 16, 1)


def check(problem: Problem, seed: int = 0) -> NearKeys:
    made = NearKeys(problem, "cpu", seed)
    set_backend("triton")
    return made


def default(problem: Problem, variant: str) -> Config:
    return get_variant("commit", variant).default(problem, limits_of(-1)[1])


@pytest.mark.parametrize(
    ("variant", "problem"),
    [
        ("steps", LOSSLESS),
        ("steps", LOSSLESS.replace(in_dtype="fp16", gate_mode="raw", dk=40, pending=0)),
        ("blocks", LOSSLESS.replace(family="deltanet", dk=16)),
        ("steps", LOSSLESS.replace(family="kda", dk=16)),
        ("path", LOSSLESS.replace(precision="fast")),
        ("path", LOSSLESS.replace(precision="fast", in_dtype="fp16", state_dtype="fp16", nodes=32, pending=32)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.family}-{value.in_dtype}-{value.precision}",
)
def test_what_goes_token_by_token_passes_and_a_fast_solve_too(variant: str, problem: Problem) -> None:
    check(problem).run(default(problem, variant))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_solve_is_no_lossless_commit_of_a_chain(dtype: str) -> None:
    problem = LOSSLESS.replace(in_dtype=dtype)
    with pytest.raises(CandidateError, match="where keys nearly repeat") as caught:
        check(problem).run(default(problem, "path"))
    assert caught.value.kind == "wrong"


def test_only_the_full_check_has_these_keys() -> None:
    case = CheckCase(LOSSLESS, "cpu", 0)
    set_backend("triton")
    path = default(LOSSLESS, "path")
    assert case.gate(path) < 1e-6
    set_backend(None)
    assert case.near is not None  # Drawn by torch's commits.
    set_backend("triton")
    with pytest.raises(CandidateError, match="nearly repeat"):
        case.run(path)


def test_every_slot_is_judged_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = NearKeys(LOSSLESS, "cpu", 0)
    set_backend("torch")
    made.run(None)
    real = NearKeys.errors
    for bad in (made.limits[0][0] * 1.01, float("inf")):
        monkeypatch.setattr(NearKeys, "errors", lambda self, config, bad=bad: [*real(self, config)[:-1], bad])
        with pytest.raises(CandidateError, match="of a slot"):
            made.run(None)
    assert all(torch.isfinite(torch.tensor(part)).all() for part in made.limits)
