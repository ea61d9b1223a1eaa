"""The kernels that copy slots, interpreted, on pools of any strides."""

from __future__ import annotations

import pytest
from bole_testing.slot_pools import check_copies, slot_pools

from bole_runtime.state import copy_slots_triton

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]


@pytest.mark.parametrize("name", slot_pools("cpu"))
def test_copies_on_any_strides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_slots_triton, "_STRIDED_BLOCK", 16)  # several blocks a slot
    check_copies(slot_pools("cpu")[name])
