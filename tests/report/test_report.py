"""The report: self-contained, everything escaped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import search_fakes as fakes

from bole_codegen.report import as_json, failures_line, results_table, write_report
from bole_codegen.report.html import render_report
from bole_codegen.search.finish import BucketResult
from bole_runtime import gpus


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found, _ = fakes.run(tmp_path_factory.mktemp("run"), fakes.targets(), trials=100, plant={"screen 16": "wrong"})
    return found


def test_the_table_lists_every_bucket(result: Any) -> None:
    text = results_table(result.entries)
    assert " ".join(text.splitlines()[0].split()) == "bucket default us tuned us floor us ratio error variant"
    assert len(text.splitlines()) == 2 + 3
    assert "fused BV=64 STAGES=2" in text
    assert failures_line(result.failures) == "candidates that do not count: 3 gave wrong numbers"
    assert failures_line({}) == "no candidate failed"


def test_json_holds_everything(result: Any) -> None:
    import json

    data = json.loads(as_json(result, "h200", "measured", ["a.json"]))
    assert len(data["entries"]) == 3
    assert data["failures"] == {"wrong": 3}


def test_the_report_is_self_contained_and_escaped(result: Any, tmp_path: Path) -> None:
    evil = '<script>alert(1)</script> $\\frac{1}{2}$ & "quotes"'
    result.buckets.append(BucketResult(fakes.targets((2,))[0], None, evil))
    try:
        path = tmp_path / "deep" / "report.html"
        write_report(path, result, gpus.get("h200"), "measured", {"command": evil, "empty": ""}, 4100.0)
    finally:
        result.buckets.pop()
    text = path.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#)", text)
    assert "url(http" not in text
    # Before and after, the roofline, three histories and the bars of one variant.
    assert text.count("<svg") == 2 + 3 + 1
    assert "Parameters" in text
    assert "gave wrong numbers" in text
    assert "Nothing ran" not in text
    ids = re.findall(r'<clipPath id="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_importances_find_what_the_times_depend_on(result: Any) -> None:
    from bole_codegen.report.importance import importances

    (ranked,) = importances(result.searches).values()
    found = dict(ranked)
    assert next(iter(found)) == "BV"
    assert found["BV"] > 0.4 > found.get("MODE", 0.0)


def test_where_the_time_went_is_told(result: Any) -> None:
    from bole_codegen.report import offline_line
    from bole_codegen.search.ledger import Ledger, describe

    ledger = Ledger(workers={"compile": 2})
    for phase, seconds in (("compile", 6.0), ("time", 1.5)):
        ledger.enter(phase)
        ledger.leave(phase, seconds)
    report = ledger.report(4.0)
    assert report["compile_workers_busy"] == 0.75
    assert report["device_idle"] == 4.0
    text = describe(report)
    assert "compiling 6.0 s, timing candidates 1.5 s" in text
    assert "device idle 4.0 s" in text
    result.spent = report
    try:
        assert "timing candidates" in render_report(result, gpus.get("h200"), "measured", {}, 4000.0)
    finally:
        result.spent = {}
    assert "replaces it in 3" in offline_line(result.entries)


def test_an_empty_run_still_has_a_report() -> None:
    from bole_codegen.search.outcome import RunResult

    empty = RunResult(buckets=[BucketResult(fakes.targets((1,))[0], None, "no time")])
    text = render_report(empty, gpus.get("h100"), "predicted", {}, None)
    assert "Buckets without a result" in text
    assert "Nothing ran" in text
