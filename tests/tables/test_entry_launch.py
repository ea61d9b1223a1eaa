"""An entry says which launch it was timed with, and whoever times it again takes that one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import search_fakes
import table_fakes as fakes
from test_table_tools import real_entry

from bole_codegen import cli
from bole_codegen.arguments import UsageError, make_parser, targets_of
from bole_codegen.render import render
from bole_codegen.search.choose import make_entry
from bole_codegen.search.results import Timed
from bole_codegen.search.targets import Target
from bole_codegen.tables.diff import describe_changes, diff_entries
from bole_codegen.tables.verify import target_of, verify_entries
from bole_runtime import gpus
from bole_runtime.kernels.default import default_config
from bole_runtime.kernels.variants import all_variants
from bole_runtime.tables.load import dump, load_file, load_table
from bole_runtime.tables.lookup import tuned_roots
from bole_runtime.tables.schema import TableFile, launch_of

P = fakes.PROBLEM
LIMITS = gpus.get("h200").limits()
#: Launches that the heads of a usual model, 16 key heads, do not give.
SEARCHES = [
    "--families kda --hk 12 --hv 12 --dk 128 --dv 128 --nodes 16 --batch 1,8 --ops verify",
    "--families mamba2 --hk 8 --hv 128 --dk 64 --dv 128 --nodes 16 --batch 1,8,64",
    "--hk 3 --hv 6 --dk 64 --dv 64 --nodes 32 --batch 5 --depth 16 --pending 16",
    "--hk 16 --hv 32 --dk 128 --dv 128 --nodes 16 --batch 3 --shape chain",
    "--hk 16 --hv 32 --dk 128 --dv 128 --nodes 16 --batch 3 --shape",
    "--ops tree_conv,conv_commit --channels 6144 --width 4 --batch 3,8 --nodes 16 --shape binary",
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOLE_CACHE_DIR", str(tmp_path / "cache"))


class Evaluator(search_fakes.LocalEvaluator):
    """Passes everything, and remembers which targets were timed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(search_fakes.FakeBench(str(folder / "calls")))
        self.timed: list[Target] = []

    async def screen(self, problem: Any, config: Any, keep: bool = False) -> Any:
        return search_fakes.Screened(1e-6)

    confirm = screen

    async def finals(self, target: Any, configs: Any, device: int) -> Any:
        self.timed.append(target)
        return {c: Timed(5.5, 0.1) for c in configs}


def searched(line: str) -> tuple[Target, ...]:
    words = line.split()
    return targets_of(make_parser().parse_args([*words, "[2, 2, 2]"] if words[-1] == "--shape" else words))


def found(target: Target) -> Any:
    """Return the entry that a search of a target makes."""
    config = default_config(target.problem, LIMITS)
    kernels = render(target.kernels, config)
    return make_entry(
        target, {config: Timed(5.5, 0.1, 4)}, config, config, rendered=kernels, floor_us=4.0, error=1e-3,
        label="measured", transferred_from=None, trials=1,
    )  # fmt: skip


def write(root: Path, *entries: Any) -> Path:
    """Write a table of entries of any one family."""
    (family,) = {e.family for e in entries}
    path = root / "h200" / f"{family}.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(dump(msgspec.structs.replace(fakes.table(), family=family, entries=list(entries))))
    return path


@pytest.mark.parametrize("line", SEARCHES)
def test_the_launch_of_a_search_is_that_of_its_entry(line: str, tmp_path: Path) -> None:
    targets = searched(line)
    path = write(tmp_path, *(found(t) for t in targets))
    table = load_table(path, all_variants)
    assert not table.skipped
    assert dump(load_file(path)) == path.read_bytes()
    by_problem = {t.problem: t for t in targets}
    assert {e.problem for e in table.entries} == set(by_problem)
    for entry in table.entries:
        again, target = target_of(entry.problem, entry.entry), by_problem[entry.problem]
        assert launch_of(entry.entry) is not None
        assert (again.hk, again.hv, again.batch) == (target.hk, target.hv, target.batch)
        assert again.shape == target.shape.strip("[]").replace(" ", "")


@pytest.mark.parametrize("line", SEARCHES[:2])
def test_a_recheck_times_that_launch(line: str, tmp_path: Path) -> None:
    targets = searched(line)
    entries = load_table(write(tmp_path, *(found(t) for t in targets)), all_variants).entries
    evaluator = Evaluator(tmp_path)
    verdicts = verify_entries(entries, evaluator, default_config, LIMITS)  # type: ignore[arg-type]
    assert set(evaluator.timed) == set(targets)
    assert all(v.launch_recorded and v.launch for v in verdicts)
    assert {v.launch["hv"] for v in verdicts if v.launch} == {t.hv for t in targets}


@pytest.mark.parametrize("line", SEARCHES)
def test_a_reproduction_runs_that_launch(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = searched(line)[-1]
    write(tmp_path, found(target))
    key = target.problem.key()
    assert cli.main(["--gpu", "h200", "--reproduce", key, "--only-out", "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    shape = target.shape.strip("[]").replace(" ", "")
    assert f"Target(PROBLEM, hk={target.hk}, hv={target.hv}, batch={target.batch}, shape={shape!r})" in captured.out
    assert "does not say" not in captured.out


def test_entries_of_before_are_as_they_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in sorted(tuned_roots()[-1].glob("*/*.json")):
        # What they do not say is not written either.
        assert json.loads(dump(load_file(path))) == json.loads(path.read_bytes())
        assert not load_table(path, all_variants).skipped
    commit = P.replace(op="commit")
    path = fakes.write(tmp_path, real_entry(commit))
    assert "batch" not in path.read_text()
    (entry,) = load_table(path, all_variants).entries
    assert launch_of(entry.entry) is None
    assert target_of(entry.problem, entry.entry) == target_of(entry.problem)
    # Whoever times it is told.
    assert cli.main(["--gpu", "h200", "--reproduce", commit.key(), "--only-out", "--out", str(tmp_path)]) == 0
    assert ")  # A usual launch: the entry does not say which one was timed" in capsys.readouterr().out
    (verdict,) = verify_entries([entry], Evaluator(tmp_path), default_config, LIMITS)  # type: ignore[arg-type]
    assert not verdict.launch_recorded


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hk": 12, "hv": 24, "batch": 1}, "shape is missing"),
        ({"hk": 16, "hv": 16, "batch": 2, "shape": "chain"}, "hk = 16 and hv = 16 are not of HV/HK = 2"),
        ({"hk": 16, "hv": 32, "batch": 2, "shape": "chain"}, "a launch of batch = 2 is not of work = 32"),
        ({"hk": 16, "hv": 32, "batch": 0, "shape": "chain"}, "Expected `int` >= 1"),
        ({"hk": 16, "hv": 32, "batch": 1, "shape": "../x"}, "matching regex"),
    ],
)
def test_a_launch_of_another_bucket_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = fakes.write(tmp_path, real_entry(P.replace(op="commit")))
    fakes.edit(path, lambda data: data["entries"][0].update(changes))
    table = load_table(path, all_variants)
    assert not table.entries
    assert words in table.skipped[0][1]


def test_a_shape_that_nobody_knows_fails_that_entry_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = P.replace(op="commit")
    path = fakes.write(tmp_path, real_entry(problem), real_entry(problem.replace(work=64)))
    launch = {"hk": 16, "hv": 32, "batch": 1, "shape": "weird"}
    fakes.edit(path, lambda data: data["entries"][0].update(launch))
    entries = load_table(path, all_variants).entries
    verdicts = verify_entries(entries, Evaluator(tmp_path), default_config, LIMITS)  # type: ignore[arg-type]
    assert {v.status for v in verdicts} == {"failed", "ok"}
    assert any("unknown tree shape 'weird'" in v.message for v in verdicts)
    assert cli.main(["--gpu", "h200", "--reproduce", problem.key(), "--only-out", "--out", str(tmp_path)]) == 2
    assert "unknown tree shape 'weird'" in capsys.readouterr().err


def test_a_shape_that_no_entry_can_hold_is_refused_before_the_search() -> None:
    with pytest.raises(UsageError, match="longer than the 64 characters that a table holds"):
        searched(f"--hk 1 --hv 1 --dk 32 --dv 32 --shape {'2,' * 40}2")


def test_times_of_different_launches_are_not_compared() -> None:
    launch = {"hk": 16, "hv": 32, "batch": 1, "shape": "ragged"}
    entries = [fakes.entry(P, median_us=us, **{**launch, "shape": s}) for us, s in ((8.0, "ragged"), (4.0, "chain"))]
    changes = diff_entries({"k": entries[0]}, {"k": entries[1]})
    assert (changes[0].kind, changes[0].ratio) == ("launch", None)
    assert describe_changes(changes).splitlines()[-1] == "1 entry: 1 launch"
    assert diff_entries({"k": entries[0]}, {"k": fakes.entry(P, median_us=4.0)})[0].kind == "faster"
    assert json.loads(dump(TableFile(**{f: getattr(fakes.table(), f) for f in TableFile.__struct_fields__})))
