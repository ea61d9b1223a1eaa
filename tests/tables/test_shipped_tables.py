"""The tables in the package: what they name is there, and is what a call would run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import bole_tuned
from bole_codegen.render import render
from bole_codegen.tables.kernels import write_kernels
from bole_runtime import gpus
from bole_runtime.kernels.loader import load
from bole_runtime.kernels.text import template_hash
from bole_runtime.kernels.variants import all_variants, get_variant
from bole_runtime.tables.load import load_table

ROOT = Path(next(iter(bole_tuned.__path__)))
TABLES = sorted(ROOT.glob("*/*.json"))


@pytest.mark.parametrize("path", TABLES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_entry_is_valid_and_runs_the_kernels_that_are_shipped_with_it(path: Path) -> None:
    pytest.importorskip("triton")
    table = load_table(path, all_variants)
    limits = gpus.get(table.header.gpu.key).limits()
    assert table.entries
    for entry in table.entries:
        reason = get_variant(entry.problem.op, entry.config.variant).reason(entry.problem, entry.config, limits)
        assert reason is None, f"{entry.problem.key()}: {reason}"
        for kernel in load(entry.problem, entry.config, tuple(k.name for k in entry.entry.kernels)):
            file = Path(kernel.function.fn.__code__.co_filename)
            assert file.resolve() == (path.parent / "kernels" / f"{kernel.name}.py").resolve(), entry.problem.key()


@pytest.mark.parametrize("folder", sorted({path.parent for path in TABLES}), ids=lambda p: p.name)
def test_kernels_are_those_that_the_templates_make_today(folder: Path) -> None:
    """Their headers say so; of others a process renders every one, to compare. ``BOLE_ACCEPT_GOLDEN=1`` writes them."""
    if os.environ.get("BOLE_ACCEPT_GOLDEN") == "1":
        write_kernels(folder, render, all_variants)
    now = f"# template hash: {template_hash()}\n"
    older = [file.name for file in sorted((folder / "kernels").glob("*.py")) if now not in file.read_text()[:2000]]
    assert not older, f"written before the templates changed: {older}; BOLE_ACCEPT_GOLDEN=1 brings their headers up"
