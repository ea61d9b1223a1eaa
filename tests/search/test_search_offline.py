"""A search without the GPU that goes on from a journal predicts what an undisturbed one does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import search_fakes as fakes
import table_fakes

from bole_codegen.search.offline import OfflineEvaluator
from bole_codegen.search.results import Failed, KernelResources, Timed
from bole_codegen.search.targets import class_of
from bole_runtime import gpus


class Pool:
    """No processes."""

    restarts = 0

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


class LocalCompiler:
    """Compiles nothing, notes what it is asked for, and finds more spills than the model guesses."""

    def __init__(self, stop_after: int | None = None, broken: bool = False) -> None:
        self.pool = Pool()
        self.asked: list[Any] = []
        self._stop_after = stop_after
        self._broken = broken

    async def candidate(self, problem: Any, config: Any, wide: bool = False) -> Any:
        self.asked.append((problem, config))
        if self._stop_after is not None and len(self.asked) > self._stop_after:
            raise KeyboardInterrupt
        if self._broken:
            return Failed("compile", "no longer")
        return (KernelResources(100_000, 250, 60 - config["STAGES"] - config["BV"] // 16),)


def offline(compiler: LocalCompiler) -> OfflineEvaluator:
    evaluator = OfflineEvaluator(gpus.get("h200"), lambda op, name: table_fakes.FUSED, fakes.render, workers=1)
    evaluator._compiler = compiler  # type: ignore[assignment]
    return evaluator


def search(folder: Path, compiler: LocalCompiler, trials: int = 100) -> tuple[Any, list[Any]]:
    folder.mkdir(exist_ok=True)
    # Five buckets, of which three are searched: two are timed in the end only.
    driver, saved = fakes.make(folder, trials=trials, anchors=3)
    driver._evaluator = driver._finisher._evaluator = offline(compiler)
    driver.run(fakes.targets((1, 4, 8, 16, 64)))
    return driver.result, saved


def predictions(saved: list[Any]) -> dict[Any, Any]:
    return {e.key(): (e.params, e.median_us, e.default_us, e.runner_up, e.margin) for e in saved}


def test_a_resumed_search_predicts_what_an_undisturbed_one_does(tmp_path: Path) -> None:
    _, undisturbed = search(tmp_path / "whole", LocalCompiler())
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "killed", LocalCompiler(stop_after=7))
    result, resumed = search(tmp_path / "killed", LocalCompiler())
    assert result.resumed > 0
    assert len(undisturbed) == 5
    assert predictions(resumed) == predictions(undisturbed)
    # Everything is in the journal, the ends of the buckets are not: more candidates were asked for.
    result, again = search(tmp_path / "whole", LocalCompiler(), trials=120)
    assert result.resumed > 0
    assert predictions(again) == predictions(undisturbed)


def test_finals_compile_what_this_run_did_not_and_nothing_twice() -> None:
    target, config = fakes.targets((8,))[0], table_fakes._default(table_fakes.PROBLEM, table_fakes.LIMITS)

    async def times(evaluator: OfflineEvaluator, screen: bool) -> Any:
        if screen:
            await evaluator.screen(class_of(target.problem), config)
        await evaluator.confirm(class_of(target.problem), config)
        return (await evaluator.finals(target, [config], 0))[config]

    first, second = LocalCompiler(), LocalCompiler()
    screened, taken_over = (asyncio.run(times(offline(c), s)) for c, s in ((first, True), (second, False)))
    assert isinstance(screened, Timed)
    assert taken_over == screened
    assert first.asked == second.asked == [(class_of(target.problem), config)]


def test_what_no_longer_compiles_does_not_count() -> None:
    target, config = fakes.targets((8,))[0], table_fakes._default(table_fakes.PROBLEM, table_fakes.LIMITS)
    evaluator = offline(LocalCompiler(broken=True))
    assert asyncio.run(evaluator.confirm(class_of(target.problem), config)) == Failed("compile", "no longer")
    assert asyncio.run(evaluator.finals(target, [config], 0)) == {config: Failed("compile", "no longer")}
