"""What ``bole-tune`` says of tables that exist: differences, explanations, scripts, rechecks, staleness."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import search_fakes
import table_fakes as fakes

from bole_codegen import actions, cli
from bole_codegen.render import render
from bole_codegen.search.results import Failed, Timed
from bole_codegen.tables.diff import describe_changes, diff_entries, read_entries
from bole_codegen.tables.keys import parse_key
from bole_codegen.tables.verify import verify_entries
from bole_runtime import gpus
from bole_runtime.kernels.default import default_config
from bole_runtime.tables.load import load_table
from bole_runtime.tables.lookup import Dispatcher, TableWarning

P = fakes.PROBLEM
COMMIT = P.replace(op="commit")
RECORD = gpus.get("h200")


def real_entry(problem: Any = COMMIT, **changes: Any) -> Any:
    """Return an entry of the analytic default with the kernels that are rendered today."""
    config = default_config(problem, RECORD.limits())
    kernels = [{"name": k.name, "text_hash": k.text_hash} for k in render(problem, config)]
    made = [fakes.KernelRef(**k) for k in kernels]
    return fakes.entry(problem, config.as_dict(), **{"variant": config.variant, "kernels": made, **changes})


@pytest.mark.parametrize("problem", [P, COMMIT.replace(pending=16, depth=8, work=1024, gate_mode="ready")])
def test_a_key_names_its_problem(problem: Any) -> None:
    assert parse_key(problem.key()) == problem
    with pytest.raises(ValueError, match="is no table key"):
        parse_key(problem.key() + "x")


def test_a_name_as_the_tables_print_it_is_a_key_too() -> None:
    assert parse_key("verify gdn 128x128 g2 bf16/fp32 raw fast n9 w33") == P.replace(work=64)
    with pytest.raises(ValueError, match="precision 'slow' is not one of fast, lossless"):
        parse_key("verify gdn 128x128 g2 bf16/fp32 raw slow n16 w32")


def test_a_difference_reads_like_a_review(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    other = {"BV": 128, "STAGES": 1, "MODE": "rhs"}
    fakes.write(old, *(fakes.entry(P.replace(work=w), median_us=10.0) for w in (1, 2, 4, 8, 16)))
    fakes.write(
        new,
        fakes.entry(P.replace(work=1), median_us=8.0),
        fakes.entry(P.replace(work=2), other, median_us=12.0),
        fakes.entry(P.replace(work=4), other, median_us=10.1),
        fakes.entry(P.replace(work=8), median_us=10.1),
        fakes.entry(P.replace(work=32), median_us=9.0),
    )
    (old / "h200" / "known-bad").mkdir()
    (old / "h200" / "known-bad" / "triton-3.6.0.json").write_text("{}")
    changes = diff_entries(read_entries(old), read_entries(new))
    assert {c.kind: c.key.rsplit("-w", 1)[1] for c in changes} == {
        "faster": "1", "slower": "2", "choice": "4", "same": "8", "removed": "16", "added": "32",
    }  # fmt: skip
    text = describe_changes(changes)
    assert "10.00 us -> 8.00 us (0.80x)" in text
    assert "(1.20x); fused: BV 64 -> 128" in text
    assert text.splitlines()[-1] == "6 entries: 1 added, 1 removed, 1 faster, 1 slower, 1 choice, 1 same"
    assert cli.main(["--diff", str(old), str(new), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 6
    assert cli.main(["--diff", str(old / "h200" / "gdn.json"), str(new)]) == 0


def test_explain_says_what_is_taken_and_why_not_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fakes.write(
        tmp_path,
        real_entry(COMMIT.replace(work=16)),
        real_entry(COMMIT.replace(work=64), label="predicted"),
        triton="3.6.0",
    )
    assert cli.main(["--gpu", "h200", "--explain", COMMIT.key(), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"as a process with BOLE_TUNED_DIR={tmp_path} sees it" in out
    assert "was predicted without a GPU; it is used once warmup() has checked it here" in out
    assert "-> h200" in out
    assert "it runs steps(" in out
    assert cli.main(["--gpu", "h200", "--explain", COMMIT.replace(dk=64).key(), "--out", str(tmp_path)]) == 0
    assert "no table has an entry that could stand in" in capsys.readouterr().out


def test_explain_says_that_the_environment_names_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOLE_TUNED_DIR", str(tmp_path / "none"))
    explain = ["--gpu", "h200", "--explain", COMMIT.key(), "--out"]
    fault = f"BOLE_TUNED_DIR={tmp_path / 'none'} is no folder"
    assert cli.main([*explain, str(tmp_path)]) == 0
    assert f"the process would warn: bole: {fault}" in capsys.readouterr().out
    fakes.write(tmp_path, real_entry())
    assert cli.main([*explain, str(tmp_path)]) == 0
    assert f"here, {fault}" in capsys.readouterr().out


def test_tables_as_json_are_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = real_entry()
    path = fakes.write(tmp_path, held)
    fakes.edit(path, lambda d: path.with_name("kda.json").write_text(json.dumps({**d, "family": "kda", "entries": []})))
    show = ["--gpu", "h200", "--show", "--json", "--out"]
    assert cli.main([*show, str(tmp_path), "--only-out"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["gpu"] == "h200"
    assert [(t["path"], t["entries"], t["gpu"]["key"]) for t in data["tables"]] == [
        (str(path), 1, "h200"), (str(path.with_name("kda.json")), 0, "h200"),
    ]  # fmt: skip
    assert [e["variant"] for e in data["entries"]] == [held.variant]
    # Those of the package: of recurrences and of convolutions.
    assert cli.main([*show, str(tmp_path / "none")]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["tables"]) > 1
    assert sum(t["entries"] for t in data["tables"]) == len(data["entries"])
    assert {"verify", "tree_conv"} <= {e["op"] for e in data["entries"]}


@pytest.mark.slow  # A process that imports torch.
def test_a_reproduction_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = COMMIT.replace(dk=32, dv=32, work=4)
    fakes.write(tmp_path, real_entry(small))
    assert cli.main(["--gpu", "h200", "--reproduce", small.key(), "--out", str(tmp_path)]) == 0
    script = tmp_path / "reproduce.py"
    script.write_text(capsys.readouterr().out)
    assert "the table has 5.50" in script.read_text()
    done = subprocess.run([sys.executable, str(script), "--torch"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "relative error against the fp64 reference: " in done.stdout


def test_a_reproduction_is_of_the_memory_of_the_gpu_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # One layer takes 80 GiB.
    key = "verify/gdn/dk256-dv256-g1/fp32-sfp32/raw/lossless/n64-d64-p0-w131072"
    assert cli.main(["--gpu", "h200", "--reproduce", key, "--out", str(tmp_path)]) == 0
    assert "\nlayers = 1\n" in capsys.readouterr().out
    assert cli.main(["--gpu", "rtx4090", "--reproduce", key, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{key} does not fit NVIDIA GeForce RTX 4090: one layer of this bucket needs 82120 MiB" in error
    assert cli.main(["--gpu", "b200", "--reproduce", key.replace("131072", "1048576"), "--out", str(tmp_path)]) == 2
    assert "does not fit NVIDIA B200" in capsys.readouterr().err


def test_verify_rechecks_numbers_and_times(tmp_path: Path) -> None:
    works = (1, 2, 4, 8, 16)
    path = fakes.write(tmp_path, *(fakes.entry(P.replace(work=w), median_us=10.0) for w in works))
    entries = load_table(path, fakes.variants).entries
    now = {1: 10.3, 2: 13.0, 4: 8.0, 8: 20.0}

    class Evaluator(search_fakes.LocalEvaluator):
        async def confirm(self, problem: Any, config: Any) -> Any:
            return await super().confirm(problem, config)

        async def finals(self, target: Any, configs: Any, device: int) -> Any:
            work = target.problem.work
            if work == 16:
                return {c: Failed("wrong", "off by 0.6") for c in configs}
            return {c: Timed(now[work] if c["BV"] == 64 else 15.0, 0.1) for c in configs}

    bench = search_fakes.FakeBench(str(tmp_path / "calls"))
    verdicts = verify_entries(entries, Evaluator(bench), fakes._default, fakes.LIMITS)  # type: ignore[arg-type]
    found = {parse_key(v.key).work: (v.status, v.message) for v in verdicts}
    assert {w: s for w, (s, _) in found.items()} == {1: "ok", 2: "slower", 4: "faster", 8: "behind", 16: "failed"}
    assert found[8][1] == "20.00 us, the table has 10.00; the default takes 15.00"
    assert found[16][1] == "wrong: off by 0.6"
    plant = {"check 64": "wrong"}
    bench = search_fakes.FakeBench(str(tmp_path / "calls"), plant)
    verdicts = verify_entries(entries, Evaluator(bench), fakes._default, fakes.LIMITS)  # type: ignore[arg-type]
    assert {v.status for v in verdicts} == {"failed"}


def test_stale_entries_of_every_kind_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = real_entry()
    path = fakes.write(tmp_path, good)
    assert cli.main(["--stale", "--gpu", "h200", "--only-out", "--out", str(tmp_path)]) == 0
    assert "0 stale entries in 1 table: " in capsys.readouterr().err
    # Another template: another hash. Another space: a parameter that is gone. Another schema: another version.
    hashes = [fakes.KernelRef(name=k.name, text_hash="0" * 16) for k in good.kernels]
    fakes.write(tmp_path, real_entry(kernels=hashes), real_entry(COMMIT.replace(work=64)))
    fakes.edit(path, lambda data: data["entries"][1]["params"].update(gone=1))
    assert cli.main(["--stale", "--out", str(tmp_path), "--json"]) == 1
    reasons = [s["reason"] for s in json.loads(capsys.readouterr().out)["stale"]]
    assert len(reasons) == 2
    assert any("the text of" in r and "changed" in r for r in reasons)
    assert any("has no parameter 'gone'" in r for r in reasons)
    fakes.edit(path, lambda data: data.update(schema_version=99))
    assert cli.main(["--stale", "--out", str(tmp_path)]) == 1
    assert "99 is not 1, the version that this release reads" in capsys.readouterr().out


def test_the_runtime_warns_once_of_a_stale_entry(tmp_path: Path) -> None:
    good = real_entry()
    fakes.write(tmp_path, good)
    dispatcher = Dispatcher((tmp_path,), user_roots=1, triton="3.6.0")
    found = dispatcher.resolve(COMMIT, "NVIDIA H200", RECORD.limits())
    assert found.entry is not None
    names = [k.name for k in good.kernels]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatcher.note_stale(COMMIT, found, names)
        # The entry stands in for another bucket, whose kernels are its own.
        dispatcher.note_stale(COMMIT.replace(nodes=8), found, ["another"])
    with pytest.warns(TableWarning, match=r"tuned with other kernels than those of this release.*bole-tune --gpu h200"):
        dispatcher.note_stale(COMMIT, found, [n[:-8] + "00000000" for n in names])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatcher.note_stale(COMMIT, found, ["x"])


def test_shipped_tables_are_not_stale(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Retune, or remove the entries that this names."""
    status = cli.main(["--stale", "--out", str(tmp_path)])
    assert status == 0, capsys.readouterr().out


def test_actions_are_options() -> None:
    from bole_codegen.arguments import make_parser

    args = make_parser().parse_args(["--explain", "x"])
    assert actions.chosen(args) == "explain"
    assert actions.chosen(make_parser().parse_args([])) is None
