"""Candidates that really do not compile, fit or end, in real compiling processes. No GPU is needed for that."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import search_sim as sim
from compile_plants import COMPILING

from bole_codegen.render import render
from bole_codegen.search import compiler as module
from bole_codegen.search.compiler import Compiler, spilled
from bole_codegen.search.results import Failed, KernelResources
from bole_runtime.kernels.variants import get_variant

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

(TARGET,) = sim.targets(precisions=["lossless"])
STEPS = get_variant("commit", "steps")
CONFIGS = list(STEPS.enumerate(TARGET.problem, sim.RECORD.limits()))[: len(COMPILING) + 2]


def test_what_does_not_compile_is_told_apart_by_why(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # More than an honest one takes, on a busy machine too; only the one that never ends waits for it.
    monkeypatch.setattr(module, "COMPILE_LIMIT", 20.0)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    plant = dict(zip(map(str, CONFIGS), COMPILING, strict=False))
    compiler = Compiler("h200", render, 2, str(tmp_path / "log"), factory="compile_plants:PlantedCompiler")
    compiler.pool._options = [{**options, "plant": plant} for options in compiler.pool._options]

    async def every() -> list[Any]:
        return list(await asyncio.gather(*(compiler.candidate(TARGET.kernels, c) for c in CONFIGS)))

    try:
        results = asyncio.run(every())
    finally:
        compiler.pool.close()
    found = dict(zip(COMPILING, results, strict=False))
    honest = results[len(COMPILING) :]
    assert honest
    for resources in (*honest, found["spilling"]):
        assert all(isinstance(r, KernelResources) for r in resources), resources
    kinds = {how: r if isinstance(r, Failed) else spilled(r, STEPS.spills) for how, r in found.items()}
    assert {how: failed and failed.kind for how, failed in kinds.items()} == COMPILING
    assert [spilled(r, STEPS.spills) for r in honest] == [None] * len(honest)
    words = {
        "refused": "planted",
        "assembly": "PTXASError",
        "shared": "262144 bytes of shared memory",
        "endless": "no answer",
    }
    for how, text in words.items():
        assert text in kinds[how].message, kinds[how]
    # What ptxas says of a kernel that it refuses is in the log, not in the terminal.
    assert "planted" not in capfd.readouterr().out
