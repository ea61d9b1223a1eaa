"""What a resumed or repeated search tells is what an undisturbed one tells."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import search_fakes as fakes
import search_sim as sim

from bole_codegen.report import as_json, earlier_line, offline_line, results_table
from bole_codegen.report.html import render_report
from bole_codegen.report.importance import importances
from bole_codegen.search.outcome import RunResult
from bole_codegen.search.results import Timed
from bole_codegen.search.simulate import Surface

#: Of each kind; those that show late have passed something before.
FAULTS = {
    "compile": 0.03, "spills": 0.05, "wrong": 0.05, "crash": 0.03, "hang": 0.02,
    "late wrong": 0.04, "late compile": 0.04, "late error": 0.04,
}  # fmt: skip
OPTIONS: dict[str, Any] = {"trials": 16, "rounds": 4, "anchors": 2, "workers": 2}
CHOSEN: dict[str, Any] = {"batches": [1, 8, 64], "nodes": [16, 32, 64]}


def simulate(path: Path, **options: Any) -> RunResult:
    return sim.Simulation(path, Surface(seed=8, noise=0.01, faulty=FAULTS), **{**OPTIONS, **options}).run(
        sim.targets(**CHOSEN)
    )


def told(result: RunResult) -> dict[str, Any]:
    """Return everything that a report says of a search but what this run took for it."""
    times: dict[str, list[float]] = {}
    for search in result.searches:
        for target in search.members:
            key = target.problem.key()
            times[key] = sorted(r.median_us for k, _, r in search.history if k == key and isinstance(r, Timed))
    return {
        "tried": result.tried,
        "duplicates": result.duplicates,
        "failures": result.failures,
        "times": times,
        "searched": sorted(t.problem.key() for s in result.searches for t in s.searched),
        "importances": {k: [(n, round(w, 9)) for n, w in v] for k, v in importances(result.searches).items()},
        "table": results_table(result.entries),
    }


def sections(result: RunResult) -> list[str]:
    return re.findall("<h2>(.*?)</h2>", render_report(result, sim.RECORD, "measured", {}, 4000.0))


def test_parameters_keep_their_declared_order(tmp_path: Path) -> None:
    first, _ = fakes.run(tmp_path, fakes.targets(), trials=100)
    again, _ = fakes.run(tmp_path, fakes.targets(), trials=100)
    assert all(b.reused for b in again.buckets)
    declared = [p.name for p in fakes.fakes.FUSED.params]
    assert declared != sorted(declared)
    for entry in again.entries:
        assert list(entry.params) == declared
        assert list(entry.runner_up.params) == declared
    assert results_table(again.entries) == results_table(first.entries)
    # As if the model were sure of the second: it is named as worth measuring.
    worth = [_second_is_faster(result.entries) for result in (first, again)]
    assert worth[0].count("worth measuring in ") == 3
    assert worth[0] == worth[1]


def _second_is_faster(entries: Any) -> str:
    import msgspec

    return offline_line(
        [msgspec.structs.replace(e, runner_up=msgspec.structs.replace(e.runner_up, median_us=1.0)) for e in entries]
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("undisturbed") / "j"
    return path, simulate(path)


def test_a_finished_search_run_again_tells_all_of_it(undisturbed: Any) -> None:
    path, first = undisturbed
    again = simulate(path)
    assert again.reused == len(again.buckets) == 9
    assert set(first.failures) >= {"wrong", "compile", "error", "spills"}
    assert told(again) == told(first)
    assert sections(again) == sections(first)
    assert "Search" in sections(again)
    assert "Parameters" in sections(again)
    assert again.bandwidth_gbs == sim.RECORD.bandwidth_gbs
    assert earlier_line(again).endswith(" evaluations; 9 of 9 buckets were finished by then")
    text = render_report(again, sim.RECORD, "measured", {}, None)
    assert f"{first.tried} compiled and checked" in text
    assert f"Taken over from earlier runs: {again.resumed} evaluations; 9 of 9 buckets" in text
    assert json.loads(as_json(again, "h200", "measured", []))["finished_earlier"] == 9
    # It takes none of the time of a search: nothing is rendered but what the table holds.
    assert again.seconds == 0.0


@pytest.mark.parametrize("budget", [20.0, 40.0, 60.0])
def test_a_search_that_was_ended_and_goes_on_tells_all_of_it(undisturbed: Any, tmp_path: Path, budget: float) -> None:
    ended = simulate(tmp_path / "j", time_budget=budget)
    assert ended.out_of_time
    rest = simulate(tmp_path / "j")
    found, expected = told(rest), told(undisturbed[1])
    assert rest.resumed > 0
    # A budget compares finalists of unfinished rounds: those are told too.
    assert found["tried"] >= expected["tried"]
    assert found["table"] == expected["table"]
    assert found["searched"] == expected["searched"]
    assert all(set(expected["times"][k]) <= set(times) for k, times in found["times"].items())
    assert sections(rest) == sections(undisturbed[1])
    # And the storage has a few more of them than the search asked for.
    again = told(simulate(tmp_path / "j"))
    assert all(set(times) <= set(again["times"][k]) for k, times in found["times"].items())
    assert {**again, "times": None} == {**found, "times": None}


def test_what_another_run_on_the_storage_searched_is_told_too(undisturbed: Any, tmp_path: Path) -> None:
    path = tmp_path / "j"
    here = sim.Simulation(path, Surface(seed=8, noise=0.01, faulty=FAULTS), **OPTIONS)
    done: list[RunResult] = []
    wait_for = here.driver._wait_for

    async def wait(one: Any) -> None:
        if not done:  # All of the other run happens while this one waits for its first group.
            with ThreadPoolExecutor(1) as aside:
                done.append(aside.submit(simulate, path).result())
        await wait_for(one)

    here.env.store.claims.take = lambda name: False  # type: ignore[method-assign]
    here.driver._wait_for = wait  # type: ignore[method-assign]
    result = here.run(sim.targets(**CHOSEN))
    assert here.evaluator.evaluations == 0
    assert told(result) == told(done[0]) == told(undisturbed[1])


def test_evaluations_of_other_text_are_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.run(tmp_path, fakes.targets((1,)), trials=8, plant={"screen 64": "wrong"})
    old = fakes.render

    def changed(problem: Any, config: Any) -> Any:
        (kernel,) = old(problem, config)
        return (fakes.FakeKernel("x", "f" + kernel.text_hash[1:], kernel.plan),)

    monkeypatch.setattr(fakes, "render", changed)
    first, _ = fakes.run(tmp_path, fakes.targets((1,)), trials=100)
    again, _ = fakes.run(tmp_path, fakes.targets((1,)), trials=100)
    assert all(b.reused for b in again.buckets)
    assert (first.failures, again.failures) == ({}, {})
    assert told(again) == told(first)


@pytest.mark.parametrize("damage", [{}, {"stale": 3, "duplicates": "x", "bandwidth_gbs": -1}, {"stale": ["x"]}])
def test_results_of_before_or_edited_ones_are_read(tmp_path: Path, damage: dict[str, Any]) -> None:
    driver, _ = fakes.make(tmp_path, trials=100)
    first = driver.run(fakes.targets())
    for target in fakes.targets():
        data = driver._env.store.final(target)
        driver._env.store.set_final(target, {"trials": data["trials"], "entry": data["entry"], **damage})
    again, _ = fakes.run(tmp_path, fakes.targets(), trials=100)
    assert all(b.reused for b in again.buckets)
    assert (again.tried, again.duplicates, again.bandwidth_gbs) == (first.tried, 0, None)
    assert told(again)["times"] == told(first)["times"]
