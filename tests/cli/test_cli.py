"""``bole-tune`` from the outside: what it refuses, what it says, and a real offline search of one tiny bucket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import table_fakes as fakes

from bole_codegen import cli, which_gpu
from bole_codegen.arguments import OFFLINE_BUDGET, UsageError, make_parser, options_of, targets_of
from bole_codegen.report.html import is_report
from bole_runtime.kernels.variants import all_variants
from bole_runtime.tables.kinds import tune_command
from bole_runtime.tables.load import load_file, load_table

TINY = ["--gpu", "h100", "--offline", "--hk", "1", "--hv", "2", "--dk", "32", "--dv", "32"]
TINY += ["--nodes", "16", "--ops", "commit", "--precision", "fast"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOLE_CACHE_DIR", str(tmp_path / "cache"))


def present(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    monkeypatch.setattr(which_gpu, "present", lambda index: name)


@pytest.mark.parametrize(
    ("name", "gpu", "words"),
    [
        (None, "h100", ["no CUDA GPU", "--offline"]),
        ("NVIDIA H200", "h100", ["this machine has", "'NVIDIA H200'", "--gpu h200", "--offline"]),
        ("NVIDIA H100 PCIe", "h100", ["this machine has", "--offline"]),
        ("NVIDIA H20", "h200", ["this machine has", "--offline"]),
        ("NVIDIA H200 MIG 1g.18gb", "h200", ["MIG slice", "--offline"]),
        ("Some GPU", "h200", ["not in Bole's GPU records", "--offline"]),
    ],
)
def test_a_gpu_that_is_not_the_one_named_stops(
    name: str | None, gpu: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    present(monkeypatch, name)
    assert cli.main(["--gpu", gpu]) == 2
    error = capsys.readouterr().err
    assert all(w in error for w in words), error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--gpu h1000 --offline", "Did you mean"),
        ("--offline", "--offline needs --gpu"),
        ("--gpu h200 --devices 0,0", "names a device twice"),
        ("--gpu mi300x --offline", "not supported"),
        ("--gpu h100 --offline --model nosuch", "unknown model"),
        ("--gpu h100 --offline --model qwen3.5-9b --tp 3", "tp = 3 does not divide"),
        ("--gpu h100 --offline --model Falcon-Mamba-7B", "Falcon-Mamba-7B cannot be searched"),
        ("--gpu h200 --explain nonsense", "is no table key"),
        ("--gpu h200 --reproduce verify/nosuch/dk1-dv1-g1/bf16-sfp32/raw/fast/n16-d16-p0-w2", "family 'nosuch'"),
        ("--diff /nowhere/a /nowhere/b", "no table at /nowhere/a"),
        ("--gpu h100 --offline --verify", "needs the GPU"),
        ("--gpu h100 --offline --exhaustive --hk 1 --hv 1 --dk 32 --dv 32", "these options name 96"),
        ("--gpu h100 --offline --hk 2", "needs --hv, --dk, --dv too"),
        ("--gpu h100 --offline --hk 2 --hv 3 --dk 64 --dv 64", "multiple of key heads"),
        ("--gpu h100 --offline --hk 2 --hv 4 --dk 64 --dv 64 --nodes 9999", "above the largest"),
        ("--gpu h100 --offline --hk 2 --hv 4 --dk 64 --dv 64 --trials 0", "--trials must be at least 1"),
        ("--gpu h100 --offline --hk 2 --hv 4 --dk 64 --dv 64 --time-budget -1", "--time-budget must be"),
        ("--gpu h100 --offline --hk 2 --hv 4 --dk 64 --dv 64 --time-budget nan", "--time-budget must be"),
        ("--gpu h100 --offline --hk 2 --hv 4 --dk 64 --dv 64 --batch 99999999999", "batch = 99999999999 is above"),
        ("--gpu h100 --offline --hk 2 --hv 4 --dk 64 --dv 64 --shape weird", "unknown tree shape 'weird'"),
        ("--gpu h100 --offline --hk 1 --hv 1 --dk 100000 --dv 64", "dk = 100000 is above the largest"),
    ],
)
def test_wrong_usage_says_what_to_do(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments.split()) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", [None, "NVIDIA H200", "Some GPU"])
def test_a_recheck_is_not_told_to_go_offline(
    name: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    present(monkeypatch, name)
    assert cli.main(["--verify", "--gpu", "h100"]) == 2
    error = capsys.readouterr().err
    assert "--offline" not in error
    assert "--verify runs every entry on the GPU of its table; without one, --show and --stale read tables" in error


@pytest.mark.parametrize("seed", ["-1", str(2**32), str(2**31), "one"])
def test_a_seed_that_no_sampler_takes(seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*TINY, "--seed", seed])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "argument --seed: " in error
    assert seed in error
    assert make_parser().parse_args(["--seed", str(2**31 - 1)]).seed == 2**31 - 1


@pytest.mark.parametrize(
    "arguments",
    [
        "--show --stale",
        "--diff a b --show",
        "--verify --explain key",
        "--reproduce key --verify",
        "--exhaustive --show",
    ],
)
def test_one_action_with_tables_at_a_time(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--gpu", "h200", *arguments.split()])
    assert caught.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["--nodes a", "--nodes ,", "--precision exact", "--families mamba1", "--wrong"])
def test_arguments_that_do_not_parse(arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments.split())
    assert caught.value.code == 2


def test_help_has_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    examples = [line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("  bole-tune ")]
    assert len(examples) >= 4
    for example in examples:
        make_parser().parse_args(example)


def test_the_command_of_a_warning_searches_exactly_that_bucket() -> None:
    for group, work in ((2, 32), (3, 256), (1, 4)):
        problem = fakes.PROBLEM.replace(group=group, work=work, depth=8, pending=16, gate_mode="ready")
        args = make_parser().parse_args(tune_command(problem, "h100").split()[1:])
        assert [t.problem for t in targets_of(args)] == [problem]


def test_a_model_gives_its_buckets_and_state_type() -> None:
    args = make_parser().parse_args(
        ["--model", "qwen3.5-9b", "--model", "Qwen3.5-4B", "--tp", "2", "--batch", "1,8", "--ops", "verify"]
    )
    targets = targets_of(args)
    assert {(t.hk, t.hv, t.problem.state_dtype) for t in targets} == {(8, 16, "fp32")}
    assert sorted({t.problem.work for t in targets}) == [16, 128]
    assert len(targets) == 2 * 3 * 2


def test_without_a_model_every_shipped_geometry_is_searched() -> None:
    targets = targets_of(make_parser().parse_args([]))
    assert {(t.problem.dk, t.problem.dv) for t in targets} >= {(128, 128), (96, 256), (128, 256)}


def test_families_without_raw_gates_are_given_ready_ones() -> None:
    words = (
        "--families lightning,mamba2 --hk 2 --hv 4 --dk 64 --dv 64 --nodes 16 --batch 4 --precision fast --ops verify"
    )
    problems = [t.problem for t in targets_of(make_parser().parse_args(words.split()))]
    assert [(p.family, p.gate_mode) for p in problems] == [("lightning", "ready"), ("mamba2", "raw")]


def test_only_sizes_that_have_kernels_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    # Some variant takes every size today.
    monkeypatch.setattr("bole_codegen.arguments.served", lambda problem: problem.nodes <= 64)
    words = "--families kda --hk 2 --hv 2 --dk 64 --dv 64 --nodes 16,64,128 --batch 4 --precision fast --ops verify"
    targets = targets_of(make_parser().parse_args(words.split()))
    assert [t.problem.nodes for t in targets] == [16, 64]
    with pytest.raises(UsageError, match="no kernels serve the sizes asked for"):
        targets_of(make_parser().parse_args(words.replace("16,64,128", "128").split()))


def test_effort_and_budget() -> None:
    def options(line: str) -> Any:
        return options_of(make_parser().parse_args(line.split()))

    assert options("--gpu h100 --offline").time_budget == OFFLINE_BUDGET
    assert options("--gpu h100").time_budget is None
    assert options("--gpu h100 --offline --time-budget 0").time_budget is None
    assert options("--effort quick").trials < options("").trials < options("--effort thorough").trials
    assert options("--trials 7").trials == 7
    with pytest.raises(UsageError):
        options("--workers 0")


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["--gpu", "a10", "--show", "--out", str(tmp_path)]) == 1
    assert "no table for a10" in capsys.readouterr().err
    variant = all_variants("commit")[0]
    problem = fakes.PROBLEM.replace(op="commit")
    from bole_runtime import gpus

    params = variant.default(problem, gpus.get("h200").limits()).as_dict()
    fakes.write(tmp_path, fakes.entry(problem, params, variant=variant.name))
    assert cli.main(["--gpu", "h200", "--show", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "commit gdn 128x128 g2 bf16/fp32 raw fast n16 w32" in out
    assert "stale: " in out  # The fake's hash is of no kernel.
    assert cli.main(["--gpu", "h200", "--show", "--json", "--out", str(tmp_path)]) == 0
    # Own entries come first.
    assert json.loads(capsys.readouterr().out)["entries"][0]["variant"] == variant.name


def test_a_table_that_cannot_be_rewritten_stops_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out" / "h100" / "gdn.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert cli.main([*TINY, "--batch", "1", "--out", str(tmp_path / "out")]) == 1
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ("", "is a folder; name a file, such as"),
        ("/file/r.html", "cannot make the folder of"),
        (None, "no regular file"),
        ("/file", "holds something else than a report, and keeps it"),
        ("/out/h100/gdn.json", "is where a table goes"),
    ],
)
def test_a_report_that_cannot_be_written_stops_before_the_search(
    report: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.Session, "run", lambda self: pytest.fail("the search began"))
    (tmp_path / "file").write_text("kept")
    where = "/dev/null" if report is None else f"{tmp_path}{report}"
    assert cli.main([*TINY, "--batch", "1", "--out", str(tmp_path / "out"), "--report", where]) == 2
    error = capsys.readouterr().err
    assert "--report: " in error
    assert words in error
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--storage", "out/h100/gdn.json"], "--storage: out/h100/gdn.json is where a table goes"),
        (["--storage", "j.log", "--report", "./j.log"], "--report: j.log is the storage"),
    ],
)
def test_no_file_is_in_the_place_of_another(
    more: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.Session, "run", lambda self: pytest.fail("the search began"))
    assert cli.main([*TINY, "--batch", "1", "--out", "out", *more]) == 2
    assert words in capsys.readouterr().err


def test_a_report_in_a_folder_that_is_no_text(tmp_path: Path) -> None:
    out = tmp_path / os.fsdecode(b"o\xff")
    assert cli.main([*TINY, "--batch", "1", "--out", str(out)]) == 0
    assert is_report(out / "h100" / "report.html")
    # And may be written again.
    assert cli.main([*TINY, "--batch", "1", "--out", str(out)]) == 0


def test_a_storage_that_is_no_journal_stops_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.OfflineEvaluator, "start", lambda self: pytest.fail("workers started"))
    notes = tmp_path / "notes.txt"
    notes.write_text("my only notes, no newline at end")
    assert cli.main([*TINY, "--batch", "1", "--out", str(tmp_path / "out"), "--storage", str(notes)]) == 1
    assert "notes.txt is no journal of bole-tune" in capsys.readouterr().err
    assert notes.read_text() == "my only notes, no newline at end"
    assert not (tmp_path / "notes.txt.lock").exists()


@pytest.mark.slow
def test_an_offline_search_ends_in_table_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = [*TINY, "--batch", "1,64", "--trials", "3", "--time-budget", "0", "--out", str(out), "--json"]
    assert cli.main(command) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    path = out / "h100" / "gdn.json"
    assert data["tables"] == [str(path)]
    assert data["label"] == "predicted"
    table = load_table(path, all_variants)
    assert not table.skipped
    assert {e.problem.work for e in table.entries} == {2, 128}
    for entry in table.entries:
        assert entry.entry.label == "predicted"
        assert entry.entry.error is None
        assert entry.entry.median_us <= (entry.entry.default_us or 1e9)
        assert all(k.text_hash for k in entry.entry.kernels)
    assert (table.header.gpu.device_name, table.header.gpu.driver) == ("NVIDIA H100 80GB HBM3", "")
    report = (out / "h100" / "report.html").read_text()
    assert "Nothing ran" in report
    assert report.count("<svg") >= 3
    before = path.read_bytes()
    started = time.monotonic()
    assert cli.main(command) == 0
    assert time.monotonic() - started < 60, "finished buckets are not searched again"
    assert path.read_bytes() == before
    assert json.loads(capsys.readouterr().out)["entries"] == data["entries"]
    measured = load_file(path)
    assert [e.label for e in measured.entries] == ["predicted", "predicted"]


@pytest.mark.slow
def test_an_interrupt_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [*TINY, "--batch", "1", "--trials", "30", "--out", str(out)]
    child = subprocess.Popen(
        # A shell that starts commands in the background makes them ignore the signal.
        [sys.executable, "-c", "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
         "from bole_codegen import cli; sys.exit(cli.main(sys.argv[1:]))", *command],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    journal = tmp_path / "cache" / "search" / "h100.journal"
    limit = time.monotonic() + 60
    while time.monotonic() < limit and not (journal.exists() and journal.stat().st_size > 0):
        time.sleep(0.1)
    time.sleep(1.0)
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=60)
    assert child.returncode == cli.INTERRUPTED, error
    assert "interrupted. Finished evaluations are kept" in error
    assert "bole-tune --gpu h100 --offline --hk 1" in error
