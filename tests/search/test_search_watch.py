"""Who tells the watch of the devices, and where what it says goes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import search_fakes as fakes
import table_fakes

from bole_codegen.measure.watch import Watch
from bole_codegen.search.evaluators import MeasuredEvaluator
from bole_codegen.search.outcome import Options
from bole_codegen.search.progress import Progress
from bole_codegen.search.results import Failed
from bole_codegen.search.session import Session
from bole_codegen.tables import predicted_gpu
from bole_runtime import gpus

RECORD = gpus.get("h200")
(TARGET,) = fakes.targets((1,))
CONFIGS = [table_fakes.FUSED.config({"BV": bv, "STAGES": 2, "MODE": "rhs"}) for bv in (32, 64)]


class Told(Watch):
    """Keeps what it is told."""

    def __init__(self, text: str = "") -> None:
        super().__init__(())
        self.places: list[int] = []
        self._text = text

    async def compared(self, place: int) -> None:
        self.places.append(place)

    def line(self) -> str:
        return self._text


@pytest.mark.parametrize(("plant", "comparisons"), [({}, 1), ({"finals 64": "poison"}, 4)])
def test_the_device_on_which_finalists_were_compared_is_read(
    tmp_path: Path, plant: dict[str, str], comparisons: int
) -> None:
    watch = Told()
    evaluator = MeasuredEvaluator(
        RECORD, fakes.render, (2, 5), workers=1, factory="search_fakes:FakeBench",
        compiler="search_fakes:CompileBench", watch=watch,
    )  # fmt: skip
    for pool in evaluator._timers:
        pool._options = [{"log": str(tmp_path / "calls"), "plant": plant}]
    try:
        found = asyncio.run(evaluator.finals(TARGET, CONFIGS, 1))
    finally:
        evaluator.close()
    # One that breaks the device is found alone, then the others are compared again.
    assert watch.places == [1] * comparisons
    assert [isinstance(found[c], Failed) for c in CONFIGS] == [False, bool(plant)]


@pytest.mark.parametrize("text", ["", "SM 1755 MHz at final timings"])
def test_a_table_has_what_the_watch_says(tmp_path: Path, text: str) -> None:
    gpu = predicted_gpu(RECORD)
    evaluator: Any = SimpleNamespace(label="measured")
    session = Session(
        RECORD, gpu, [TARGET], evaluator, Options(), "", tmp_path, False, 0, Progress(), watch=Told(text)
    )  # fmt: skip
    header = session._header(TARGET.problem)
    assert header.gpu.clocks == text
    assert header.gpu.triton == gpu.triton
