"""Families other than Gated DeltaNet on generated kernels, against their own float64 recurrence."""

from __future__ import annotations

import pytest
from bole_testing.gpu_geometries import GEOMETRIES
from bole_testing.gpu_plan import FAMILIES, FamilyEntry

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:bole")]


@pytest.mark.parametrize("entry", [*FAMILIES, *GEOMETRIES], ids=str)
def test_against_the_recurrence(entry: FamilyEntry) -> None:
    entry.run(entry.entry.setting.setup("cuda"))
