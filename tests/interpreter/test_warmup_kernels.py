"""warmup() runs the kernels it prepares and compares them with the torch backend."""

from __future__ import annotations

import pytest
import torch

from bole_runtime import warmup

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]


def test_checks_every_size() -> None:
    report = warmup(
        key_heads=1, value_heads=2, dk=32, dv=32, max_batch=2, max_nodes=5, dtype=torch.float32, layers=2, device="cpu"
    )
    assert [(p.op, p.work) for p, _, _ in report.checked] == [
        ("verify", 2),
        ("commit", 2),
        ("verify", 4),
        ("commit", 4),
    ]
    assert all(error < 5e-6 for _, _, error in report.checked)
    assert "4 sizes" in str(report)


@pytest.mark.parametrize("family", ["mamba2", "lightning", "simple_gla", "kda"])
def test_other_families(family: str) -> None:
    report = warmup(
        key_heads=1, value_heads=2, dk=32, dv=16, max_batch=1, max_nodes=4, dtype=torch.float32, layers=2, device="cpu",
        recurrence=family, captured=True,
    )  # fmt: skip
    assert [(p.op, p.gate_mode) for p, _, _ in report.checked] == [
        ("verify", "ready" if family == "lightning" else "raw"),
        # What a capture holds: ready gates, but for a value a channel, which are kept as given.
        ("commit", "raw" if family == "kda" else "ready"),
    ]
    assert all(error < 5e-6 for _, _, error in report.checked)


def test_a_gate_mode_the_family_does_not_have() -> None:
    with pytest.raises(ValueError, match="gate_mode: 'raw' is not allowed for 'lightning'; allowed: ready"):
        warmup(
            key_heads=1, value_heads=1, dk=16, dv=16, max_batch=1, max_nodes=3, recurrence="lightning", gate_mode="raw"
        )


def test_wrong_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from bole_runtime import warming as module

    monkeypatch.setattr(module, "_check_verify", lambda call, config: 0.2)
    with pytest.raises(RuntimeError, match=r"off by 2.0e-01 here.*BOLE_BACKEND=torch"):
        warmup(key_heads=1, value_heads=1, dk=16, dv=16, max_batch=1, max_nodes=3, dtype=torch.float32, device="cpu")
