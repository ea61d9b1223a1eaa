"""Waiting for the device or for inputs is no fault of a candidate: nothing is held against it, it is tried again."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import search_fakes as fakes

from bole_codegen.search import pool as pool_module
from bole_codegen.search.device_lock import DeviceLock
from bole_codegen.search.pool import Job, Pool
from bole_codegen.search.results import BAD_KINDS, KINDS, PASSING_KINDS, Failed
from bole_codegen.tables.known_bad import KnownBad


class LockBench:
    """Needs the device for everything."""

    def go(self, path: str) -> str:
        with DeviceLock(Path(path)).held("check"):
            return "ok"

    def hang(self, phase: str) -> None:
        import time

        from bole_codegen.search import phases

        phases.enter(phase)
        time.sleep(60)


def test_a_kind_of_its_own() -> None:
    assert set(PASSING_KINDS) <= set(KINDS)
    assert not set(PASSING_KINDS) & set(BAD_KINDS)


def test_a_device_that_others_use_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "WAIT_LIMIT", 0.3)
    path = tmp_path / "lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with Pool("test_search_waiting:LockBench", {}) as pool:
        late = pool.run([Job("go", (str(path),), 30.0, "check")])[0]
        os.close(handle)
        assert pool.run([Job("go", (str(path),), 30.0, "check")]) == ["ok"]
    assert late == Failed("busy", "no answer within 0.3 s (wait)")


@pytest.mark.parametrize(("phase", "kind"), [("draw", "busy"), ("check", "hang"), ("time", "hang"), ("run", "hang")])
def test_only_phases_without_a_kernel_are_excused(phase: str, kind: str) -> None:
    with Pool("test_search_waiting:LockBench", {}) as pool:
        (late,) = pool.run([Job("hang", (phase,), 0.3, phase)])
    assert late.kind == kind


def _search(folder: Path, known: Path, plant: dict[str, str] | None, **options: Any) -> Any:
    driver, saved = fakes.make(folder, plant=plant, trials=100, **options)
    object.__setattr__(driver._env, "known_bad", KnownBad([known], "h200", "3.6.1"))
    return driver.run(fakes.targets((1, 64))), saved


@pytest.mark.parametrize("when", ["screen", "check", "quick", "finals"])
def test_what_had_no_turn_is_tried_again_and_listed_nowhere(tmp_path: Path, when: str) -> None:
    expected = _search(tmp_path / "undisturbed", tmp_path, None)[1]
    result, saved = _search(tmp_path / "j", tmp_path, {f"{when} 64": "busy"})
    assert result.failures["busy"] >= 1
    assert all(e.params["BV"] != 64 for e in saved)
    result, saved = _search(tmp_path / "j", tmp_path, None)
    assert not result.failures
    assert result.resumed > 10
    assert not any(b.reused for b in result.buckets)
    assert saved == expected
    assert not list(tmp_path.glob("h200/known-bad/*"))
    # And is finished now.
    before = len(fakes.calls(tmp_path / "j"))
    assert all(b.reused for b in _search(tmp_path / "j", tmp_path, None)[0].buckets)
    assert len(fakes.calls(tmp_path / "j")) == before


def test_nothing_is_chosen_where_the_default_had_no_turn(tmp_path: Path) -> None:
    result, saved = _search(tmp_path, tmp_path, {"screen 32": "busy"})
    assert saved == []
    assert all(b.reason.startswith("the default had no turn: ") for b in result.buckets)
    assert len(_search(tmp_path, tmp_path, None)[1]) == 2


def test_finalists_that_wait_are_not_compared_one_by_one(tmp_path: Path) -> None:
    import asyncio

    driver, _ = fakes.make(tmp_path, isolated=True)
    evaluator = driver._evaluator
    asked: list[int] = []

    async def busy(target: Any, configs: list[Any], device: int) -> Failed:
        asked.append(len(configs))
        return Failed("busy", "no answer")

    evaluator._finals = busy
    (target,) = fakes.targets((1,))
    configs = [fakes.fakes.FUSED.config({"BV": bv, "STAGES": 1, "MODE": "rhs"}) for bv in (16, 32)]
    times = asyncio.run(evaluator.finals(target, configs, 0))
    assert asked == [2]
    assert times == dict.fromkeys(configs, Failed("busy", "no answer"))
    evaluator.close()
