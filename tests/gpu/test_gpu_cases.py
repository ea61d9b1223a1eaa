"""The shared cases on generated kernels, against the float64 recurrence."""

from __future__ import annotations

import pytest
from bole_testing.cases import Case
from bole_testing.gpu_plan import Setting, cases

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:bole")]


@pytest.mark.parametrize(("case", "setting"), [pytest.param(c, s, id=f"{c.name}-{s}") for c, s in cases()])
def test_case(case: Case, setting: Setting) -> None:
    case.body(setting.setup("cuda"))
