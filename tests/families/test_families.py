"""Recurrence specs and their registry."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from bole_runtime.families import FAMILIES, get_family, get_reference


def test_every_family_is_complete() -> None:
    for name, spec in FAMILIES.items():
        assert spec.name == name
        assert get_family(name) is spec
        assert [i.name for i in spec.inputs[:3]] == ["q", "k", "v"]
        names = [i.name for i in spec.inputs]
        assert len(set(names)) == len(names)
        assert spec.modes[0] == "ready"
        for i in spec.inputs:
            assert i.doc
            assert bool(i.shape) == bool(i.dtypes)
        assert spec.kept_mode("ready") == "ready"
        assert spec.keeps_ready == all(i.scalar for i in spec.node_gates("ready"))
        reference = get_reference(spec)
        assert callable(reference.step)
        assert callable(reference.ready_gates)


def test_gdn() -> None:
    spec = get_family("gdn")
    assert (spec.decay, spec.erase, spec.qk_l2norm, spec.l2norm_eps) == ("scalar", "decayed", True, 1e-6)
    assert spec.default_scale(64) == 0.125
    assert [i.name for i in spec.node_gates("ready")] == ["g", "beta"]
    assert [i.name for i in spec.node_gates("raw")] == ["a", "b"]
    assert [i.name for i in spec.parameters("raw")] == ["A_log", "dt_bias"]
    assert [i.name for i in spec.options("raw")] == ["beta_scale"]
    assert spec.required["raw"] == {"a", "b", "A_log", "dt_bias"}
    assert spec.allowed["ready"] == {"g", "beta"}


def test_gdn_raw_gates() -> None:
    gates = {
        "a": torch.tensor([[-200.0, 0.0, 200.0]]),
        "b": torch.tensor([[-200.0, 0.0, 200.0]]),
        "A_log": torch.tensor([0.0, 0.0, 0.0]),
        "dt_bias": torch.tensor([0.0, 0.0, 0.0]),
    }
    ready = get_family("gdn").make_ready["raw"](gates, {"beta_scale": 2.0})
    expected = torch.tensor([[-math.exp(-200), -math.log(2), -200]], dtype=torch.float64)
    torch.testing.assert_close(ready["g"], expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(ready["beta"][0, 1:], torch.tensor([1.0, 2.0]).double())
    assert 0 < ready["beta"][0, 0] < 1e-80


@pytest.mark.parametrize("name", ["mamba1", "Mamba", "path-attention", "log_linear", "TTT", "titans"])
def test_families_outside_the_form_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"recurrence: '{name}' is outside the supported form: .* Supported: comba, "):
        get_family(name)


def _table_rows() -> dict[str, list[str]]:
    text = (Path(__file__).resolve().parents[2] / "docs" / "families.md").read_text()
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        found = re.match(r"\| `(\w+)`[^|]*\|", line)
        if found:
            rows.setdefault(found[1], []).append(line)
    return rows


def test_the_docs_list_every_family_and_its_gates() -> None:
    rows = _table_rows()
    assert {n for n, lines in rows.items() if len(lines) > 1} >= FAMILIES.keys()
    for name, spec in FAMILIES.items():
        cells = [c.strip() for c in rows[name][0].strip("|").split("|")]
        decay = {"none": "1", "head": "fixed per head", "scalar": "scalar", "channel": "channel"}[spec.decay]
        erase = {"none": "nothing", "decayed": "decayed", "undecayed": "before decay"}[spec.erase]
        assert cells[1:3] == [decay, erase], name
        for cell, mode in zip(cells[4:6], ("ready", "raw"), strict=True):
            tensors = {i.name for i in spec.gates(mode) if i.shape} if mode in spec.modes else set()
            assert set(cell.replace(" ", "").split(",")) - {""} == tensors, (name, mode)
        assert bool(cells[6]) == bool(spec.skip), name
        defaults = rows[name][1]
        norms = ", ".join(spec.normed) if spec.qk_l2norm else "none"
        scale = "dk^-0.5" if spec.scale == "rsqrt_dk" else "1"
        assert f"| {norms} | {scale} |" in defaults, name
        assert ("triton" in defaults) == spec.kernels, name


def test_unknown_families() -> None:
    with pytest.raises(ValueError, match="recurrence: unknown family 'gla2'"):
        get_family("gla2")
    with pytest.raises(TypeError, match="recurrence: expected the name of a family, got NoneType"):
        get_family(None)  # type: ignore[arg-type]
