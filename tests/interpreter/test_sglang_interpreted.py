"""Rounds of SGLang's layers through the plug-in on the Triton kernels."""

from __future__ import annotations

import pytest
from bole_testing.sglang_layers import check_rounds

from bole_runtime.integrations.sglang import kda

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]


@pytest.mark.parametrize("kind", ["gdn", "kda ready", "kda bounded", "mamba2 sharded"])
def test_rounds_on_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kda, "write_gate_is_ready", lambda: kind == "kda ready")
    check_rounds(kind, "tree", track=True)
