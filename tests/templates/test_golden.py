"""Rendered kernels against the files in tests/golden. After a change of the templates, read the difference, then

BOLE_ACCEPT_GOLDEN=1 python -m pytest tests/templates/test_golden.py
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest
from bole_testing.goldens import GOLDENS, golden_kernel, golden_text

from bole_codegen.render import template_dir

FOLDER = Path(__file__).resolve().parents[1] / "golden"
ACCEPT = os.environ.get("BOLE_ACCEPT_GOLDEN") == "1"


@pytest.mark.parametrize("label", GOLDENS)
def test_golden(label: str) -> None:
    path, made = FOLDER / f"{label}.py", golden_text(golden_kernel(label).source)
    if ACCEPT:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(made, encoding="utf-8")
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = list(difflib.unified_diff(kept.splitlines(), made.splitlines(), str(path.name), "rendered", "", "", 2, ""))
    shown = "\n".join(lines[:80])
    assert not lines, f"{label} renders differently; accept with BOLE_ACCEPT_GOLDEN=1\n{shown}"


def test_no_golden_file_is_left_over() -> None:
    for path in FOLDER.glob("*.py"):
        if path.stem not in GOLDENS and ACCEPT:
            path.unlink()
    assert {path.stem for path in FOLDER.glob("*.py")} == set(GOLDENS)


def test_every_template_has_a_golden_file() -> None:
    used = {golden_kernel(label).plan.template for label in GOLDENS}
    assert used == {path.name for path in template_dir().glob("*.py.jinja")}
