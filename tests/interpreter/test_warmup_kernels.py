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


SMALL = {
    "key_heads": 1, "value_heads": 2, "dk": 16, "dv": 16, "max_batch": 1, "dtype": torch.float32, "device": "cpu"
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_flat_trees_are_checked_on_a_path_as_deep_as_they_have(
    depth: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bole_runtime import warming as module

    seen = []
    checked = module._check_commit

    def watched(call, config, layers):
        seen.append(int(call.tree.depths.max()))
        return checked(call, config, layers)

    monkeypatch.setattr(module, "_check_commit", watched)
    report = warmup(**SMALL, max_nodes=16, max_depth=depth, packed=packed)
    assert [p.op for p, _, _ in report.checked] == ["verify", "commit"]
    assert seen == [depth]
    # A commit that does nothing is off.
    monkeypatch.setattr(module, "commit", lambda *args, **kwargs: None)
    with pytest.raises(RuntimeError, match=r"commit/.* is off by"):
        warmup(**SMALL, max_nodes=16, max_depth=depth, packed=packed)


@pytest.mark.parametrize("usual", [torch.float64, torch.float16, torch.bfloat16])
def test_the_default_dtype_of_the_process_does_not_matter(usual: torch.dtype) -> None:
    before = torch.get_default_dtype()
    want = warmup(**SMALL, max_nodes=4).checked
    torch.set_default_dtype(usual)
    try:
        assert warmup(**SMALL, max_nodes=4).checked == want
    finally:
        torch.set_default_dtype(before)


def test_nor_does_the_default_device() -> None:
    with torch.device("meta"):
        assert len(warmup(**SMALL, max_nodes=4).checked) == 2


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
