"""Whole searches in real processes, some of whose candidates fail in every way there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import search_fakes as fakes

from bole_codegen.search import compiler, evaluators
from bole_codegen.search import pool as pool_module
from bole_codegen.search.results import BAD_KINDS, KINDS
from bole_codegen.tables.known_bad import KnownBad

#: Method, BV and STAGES of a candidate, to how it fails there and the kind that this is. The best ones fail: without
#: them the right table has (32, 2).
DEATHS = {
    "screen 64.2": ("hang", "hang"),
    "screen 64.1": ("kill", "killed"),
    "screen 64.3": ("segfault", "crash"),
    "screen 128.2": ("poison", "illegal"),
    "quick 128.1": ("exit", "crash"),
    "compile 16.1": ("hang", "slow"),
    "compile 16.2": ("exit", "crash"),
    "screen 16.3": ("wait", "busy"),
}
TOLD = {
    "compile 64.1": ("compile", "compile"),
    "compile 64.2": ("spill", "spills"),
    "compile 64.3": ("resources", "resources"),
    "screen 128.1": ("wrong", "wrong"),
    "screen 128.2": ("nan", "nan"),
    "screen 128.3": ("bounds", "bounds"),
    "quick 16.1": ("resources", "resources"),
    "screen 16.2": ("races", "races"),
    "screen 16.3": ("raise", "error"),
}


def test_every_kind_of_failure_is_planted() -> None:
    assert {kind for _, kind in (*DEATHS.values(), *TOLD.values())} == set(KINDS)


@pytest.mark.slow  # Every death costs a fresh process that imports torch.
@pytest.mark.parametrize("planted", [DEATHS, TOLD], ids=["deaths", "told"])
def test_planted_faults_of_every_kind_end_in_the_right_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: dict[str, tuple[str, str]]
) -> None:
    # Enough for what is no fault on a busy machine: what is planted never ends by itself.
    monkeypatch.setattr(evaluators, "CHECK_LIMIT", 8.0)
    monkeypatch.setattr(compiler, "COMPILE_LIMIT", 8.0)
    monkeypatch.setattr(pool_module, "WAIT_LIMIT", 8.0)
    plant = {place: how for place, (how, _) in planted.items()}
    driver, saved = fakes.make(tmp_path, trials=100, plant=plant, isolated=True, top=2)
    object.__setattr__(driver._env, "known_bad", KnownBad([tmp_path], "h200", "3.6.0"))
    try:
        result = driver.run(fakes.targets((1,)))
    finally:
        driver._evaluator.close()
    kinds = [kind for _, kind in planted.values()]
    assert result.failures == {kind: kinds.count(kind) for kind in kinds}
    (entry,) = saved
    assert (entry.params["BV"], entry.params["STAGES"]) == (32, 2)
    assert entry.median_us < entry.default_us
    # What says something about a kernel is not run again by any later search, the rest may be.
    (path,) = tmp_path.glob("h200/known-bad/*.json")
    listed = [bad["kind"] for bad in msgspec.json.decode(path.read_bytes())["entries"]]
    assert sorted(listed) == sorted(kind for kind in kinds if kind in BAD_KINDS)


@pytest.mark.slow
def test_what_breaks_the_device_when_finalists_are_compared_leaves_the_next_best(tmp_path: Path) -> None:
    plant: dict[str, Any] = {"finals 64": "poison", "finals 128.2": "exit"}
    result, saved = fakes.run(tmp_path, fakes.targets((1,)), trials=100, plant=plant, isolated=True, top=2)
    assert [(e.params["BV"], e.params["STAGES"]) for e in saved] == [(32, 2)]
    assert result.failures["illegal"] >= 1
