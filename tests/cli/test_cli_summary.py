"""The end of a search: what is said, in which order where both streams go to one file."""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import search_fakes
import table_fakes as fakes

from bole_codegen import cli, closing
from bole_codegen.places import Files
from bole_codegen.search.driver import OUT_OF_TIME
from bole_codegen.search.finish import BucketResult
from bole_codegen.search.outcome import RunResult


def finish(tmp_path: Path, buckets: list[BucketResult], targets: Any, report: Path | None = None) -> bool:
    """Say the end of a search of ``targets`` that ended in ``buckets``; return whether the report could be written."""
    result = RunResult(buckets=buckets, tried=7, seconds=3.0, out_of_time=len(buckets) > 1)
    session: Any = SimpleNamespace(
        evaluator=SimpleNamespace(label="measured"), paths=[tmp_path / "t.json"], targets=targets, kept=[]
    )
    files = Files(storage="", log=str(tmp_path / "log"), report=report)
    return closing.finish(argparse.Namespace(json=False, exhaustive=False), session, result, files, "bole-tune")


def test_the_table_comes_before_what_is_said_of_it_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="utf-8"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding="utf-8", write_through=True))
    (target,) = search_fakes.targets((1,))
    finish(tmp_path, [BucketResult(target, fakes.entry())], [target])
    sys.stdout.flush()
    text = raw.getvalue().decode()
    places = [text.index(words) for words in ("tuned us", "7 candidates in 3 s", "table (measured): ")]
    assert places == sorted(places)
    assert "no entry" not in text


def test_a_report_that_cannot_be_written_costs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(closing, "_report", full)
    (target,) = search_fakes.targets((1,))
    assert not finish(tmp_path, [BucketResult(target, fakes.entry())], [target], tmp_path / "report.html")
    captured = capsys.readouterr()
    assert "tuned us" in captured.out
    assert captured.err.splitlines()[-1] == "bole-tune: cannot write the report: [Errno 28] No space left on device"


def test_a_list_comes_before_its_sum_in_one_file(tmp_path: Path) -> None:
    fakes.write(tmp_path, fakes.entry(fakes.PROBLEM.replace(op="commit")))
    code = "import sys; from bole_codegen import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "--stale", "--gpu", "h200", "--only-out", "--out", str(tmp_path)]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == f"1 stale entry in 1 table: {tmp_path}/h200/gdn.json"


def test_a_reader_that_is_gone_costs_no_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    cli.say("still said")
    assert capsys.readouterr().err == "still said\n"


def test_buckets_without_an_entry_are_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    targets = search_fakes.targets((1, 8, 64))
    done = BucketResult(targets[0], fakes.entry())
    finish(tmp_path, [done, *(BucketResult(t, None, OUT_OF_TIME) for t in targets[1:])], targets)
    error = capsys.readouterr().err
    assert error.startswith("2 of 3 buckets have no entry\n")
    assert f"no result for {targets[1].problem.key()}, {targets[2].problem.key()}: {OUT_OF_TIME}\n" in error
    # An interrupt: what was not reached is in no list.
    finish(tmp_path, [done], targets[:2])
    assert capsys.readouterr().err.startswith("1 of 2 buckets has no entry\n")
