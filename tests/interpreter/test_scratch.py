"""Scratch memory is NaN in every check: a kernel that uses what none has written is found out."""

from __future__ import annotations

import pytest

from bole_codegen.search.case import CheckCase, bound
from bole_codegen.search.results import CandidateError
from bole_runtime import set_backend
from bole_runtime.backends.triton_backend.select import limits_of
from bole_runtime.kernels.loader import LoadedKernel
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.variants import get_variant

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]


@pytest.mark.parametrize(
    ("family", "variant", "dk", "nodes"),
    [
        ("gdn", "two_stage", 16, 16),
        ("kda", "two_stage_slices", 24, 16),
        ("gdn", "chunked", 16, 16),
        ("kda", "three_stage_blocks", 24, 128),
        ("gdn2", "three_stage_blocks", 40, 64),
    ],
)
def test_a_first_kernel_that_does_nothing(
    family: str, variant: str, dk: int, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem("verify", family, dk, 16, 1, "fp32", "fp32", "ready", "lossless", nodes, 16, 0, 1)
    declared = get_variant("verify", variant)
    values = declared.default(problem, limits_of(-1)[1]).as_dict()
    config = declared.config({**values, **{n: False for n in ("pdl", "chain") if n in values}})
    case = CheckCase(problem, "cpu", 3)
    set_backend("triton")  # The reference was torch's.
    assert case.run(config) < bound(problem)
    launch = LoadedKernel.launch
    first: list[str] = []

    def without_the_first(self: LoadedKernel, grid, args) -> None:
        first.append(self.name)
        if self.name != first[0]:
            launch(self, grid, args)

    monkeypatch.setattr(LoadedKernel, "launch", without_the_first)
    with pytest.raises(CandidateError, match="NaN"):
        case.run(config)
