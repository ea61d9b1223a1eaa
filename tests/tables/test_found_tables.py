"""Tables in two folders and under two names: what is read, what counts, and where writers write."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import msgspec
import pytest
import table_fakes as fakes
from test_table_tools import COMMIT, real_entry

from bole_codegen import cli
from bole_codegen.tables import LockTimeout, found, merge_entries
from bole_codegen.tables.found import find_tables, read_tables
from bole_codegen.tables.writer import write_atomically
from bole_runtime import gpus
from bole_runtime.tables.load import dump, load_file
from bole_runtime.tables.lookup import Dispatcher
from bole_runtime.tables.schema import Header

P = fakes.PROBLEM
RECORD = gpus.get("h200")
ONE, TWO, THREE = (COMMIT.replace(work=w) for w in (1, 2, 4))


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A folder of own tables with entries for one and two, and one of shipped tables with two and three."""
    monkeypatch.setenv("BOLE_CACHE_DIR", str(tmp_path / "cache"))
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    fakes.write(own, real_entry(ONE, median_us=1.0), real_entry(TWO, median_us=2.0))
    fakes.write(shipped, real_entry(TWO, median_us=20.0), real_entry(THREE, median_us=30.0))
    monkeypatch.setattr(found, "tuned_roots", lambda: (shipped,))
    monkeypatch.setattr("bole_codegen.tables.explain.tuned_roots", lambda: (shipped,))
    return own, shipped


def header() -> Header:
    return fakes.table().header()


def test_own_entries_go_before_shipped_ones_and_both_count(
    roots: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    own, _ = roots
    names = [str(r / "h200" / "gdn.json") for r in roots]
    assert [str(p) for p in find_tables(RECORD, own)] == names
    said = f"read: {names[0]} (2 entries), {names[1]} (2 entries, 1 of them behind a table before it)"
    assert read_tables(RECORD, own).line == said
    assert cli.main(["--gpu", "h200", "--show", "--json", "--out", str(own)]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert [(t["path"], t["entries"], t["behind"]) for t in data["tables"]] == [(names[0], 2, 0), (names[1], 2, 1)]
    assert [(e["work"], e["median_us"]) for e in data["entries"]] == [(1, 1.0), (2, 2.0), (4, 30.0)]
    assert captured.err == ""
    assert cli.main(["--gpu", "h200", "--show", "--out", str(own)]) == 0
    captured = capsys.readouterr()
    assert captured.out.count(" n16 w2 ") == 1
    assert "2 entries, 1 of them behind a table before it, 1 measured" in captured.out
    assert captured.err == ""


def test_scripts_are_of_the_entry_that_counts(roots: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    own, shipped = roots
    for problem, us in ((TWO, "2.00"), (THREE, "30.00")):
        assert cli.main(["--gpu", "h200", "--reproduce", problem.key(), "--out", str(own)]) == 0
        script = capsys.readouterr().out
        assert f"the table has {us}" in script
        assert f"TABLE = {str((own if problem == TWO else shipped) / 'h200' / 'gdn.json')!r}" in script
    assert cli.main(["--gpu", "h200", "--reproduce", THREE.key(), "--only-out", "--out", str(own)]) == 0
    assert f"no table has {THREE.key()} (read: {own}/h200/gdn.json (2 entries))" in capsys.readouterr().err
    assert cli.main(["--gpu", "h200", "--reproduce", TWO.key(), "--json", "--out", str(own)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["table"] == str(own / "h200" / "gdn.json")
    compile(data["script"], "script", "exec")


def test_explain_takes_own_tables_alone_if_told_so(
    roots: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    own, shipped = roots
    for only, taken in (([], shipped), (["--only-out"], None)):
        assert cli.main(["--gpu", "h200", "--explain", THREE.key(), "--out", str(own), *only]) == 0
        out = capsys.readouterr().out
        assert (str(shipped) in out) is (taken is shipped)
        assert f"tables in {own} alone" in out or not only


def test_stale_looks_into_every_file(roots: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    own, shipped = roots
    path = shipped / "h200" / "gdn.json"
    fakes.edit(path, lambda d: d["entries"][0]["kernels"][0].update(text_hash="0" * 16))
    assert cli.main(["--gpu", "h200", "--stale", "--json", "--out", str(own)]) == 1
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["read"] == [str(own / "h200" / "gdn.json"), str(path)]
    assert [s["table"] for s in data["stale"]] == [str(path)]
    assert "1 stale entry in 2 tables" in captured.err


def test_a_damaged_table_is_named_and_the_others_count(
    roots: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    own, _ = roots
    path = own / "h200" / "gdn.json"
    path.write_bytes(b"\xff\xfe")
    assert cli.main(["--gpu", "h200", "--show", "--json", "--out", str(own)]) == 1
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert [e["work"] for e in data["entries"]] == [2, 4]
    (fault,) = data["faults"]
    assert fault.startswith(f"table {path}: ")
    assert f"warning: {fault}" in captured.err
    assert cli.main(["--gpu", "h200", "--reproduce", TWO.key(), "--out", str(own)]) == 0
    assert "the table has 20.00" in capsys.readouterr().out
    # One of another GPU must not stand before the shipped ones either.
    fakes.edit(fakes.write(own, real_entry(TWO)), lambda d: d["gpu"].update(key="h100"))
    assert [e.entry.median_us for e in read_tables(RECORD, own).entries] == [20.0, 30.0]


@pytest.mark.parametrize("hard", [False, True])
def test_two_names_of_one_file_count_once(roots: tuple[Path, Path], hard: bool) -> None:
    own, shipped = roots
    for link in (own / "h200" / "gdn.json", own / "h200" / "same.json"):
        link.unlink(missing_ok=True)
        (link.hardlink_to if hard else link.symlink_to)(shipped / "h200" / "gdn.json")
    assert find_tables(RECORD, own) == [own / "h200" / "gdn.json"]
    if not hard:
        lookup = Dispatcher((own, shipped), user_roots=1, triton="3.6.0")
        assert {entry.path for _, entry in lookup.ranked(THREE, "NVIDIA H200")} == {str(own / "h200" / "gdn.json")}
    # The same folder under another name.
    (own.parent / "again").symlink_to(shipped)
    assert find_tables(RECORD, own.parent / "again") == [own.parent / "again" / "h200" / "gdn.json"]


def test_a_link_to_the_table_of_a_stand_in_does_not_hide_it(tmp_path: Path) -> None:
    path = fakes.write(tmp_path, real_entry(ONE))
    (tmp_path / "h100").mkdir()
    (tmp_path / "h100" / "gdn.json").symlink_to(path)
    lookup = Dispatcher((tmp_path,), user_roots=1, triton="3.6.0", gpus=lambda name: ("h100", ("h200",)))
    with pytest.warns(UserWarning, match="was made for 'h200'"):
        assert [key for key, _ in lookup.ranked(ONE, "NVIDIA H100 80GB HBM3")] == ["h200"]


def test_writers_write_through_a_link_and_keep_it(tmp_path: Path) -> None:
    real = fakes.write(tmp_path / "store", fakes.entry(P))
    link = tmp_path / "out" / "h200" / "gdn.json"
    link.parent.mkdir(parents=True)
    (tmp_path / "hop.json").symlink_to(os.path.relpath(real, tmp_path))
    link.symlink_to("../../hop.json")
    merge = merge_entries(link, header(), [fakes.entry(P.replace(work=64))])
    assert merge.path == link
    assert link.is_symlink()
    assert (tmp_path / "hop.json").is_symlink()
    assert len(load_file(real).entries) == 2
    assert [p.name for p in link.parent.iterdir()] == ["gdn.json"]
    # Of a link to nothing, the file is made where it leads to.
    real.unlink()
    merge_entries(link, header(), [fakes.entry(P)])
    assert link.is_symlink()
    assert len(load_file(real).entries) == 1


def test_links_that_lead_nowhere_are_not_replaced(tmp_path: Path) -> None:
    one, two = tmp_path / "h200" / "gdn.json", tmp_path / "h200" / "kda.json"
    one.parent.mkdir()
    one.symlink_to(two)
    two.symlink_to(one)
    away = tmp_path / "h200" / "away.json"
    away.symlink_to(tmp_path / "none" / "gdn.json")
    for path, words in ((one, "leads to itself"), (away, "a folder that is not there")):
        with pytest.raises(OSError, match=words):
            merge_entries(path, header(), [fakes.entry(P)])
        with pytest.raises(OSError, match=words):
            write_atomically(path, b"")
        assert path.is_symlink()
    assert sorted(p.name for p in one.parent.iterdir()) == ["away.json", "gdn.json", "kda.json"]


def test_the_lock_is_that_of_the_real_file_under_every_name(tmp_path: Path) -> None:
    real = fakes.write(tmp_path / "store", fakes.entry(P))
    link = tmp_path / "out" / "h200" / "gdn.json"
    link.parent.mkdir(parents=True)
    link.symlink_to(real)
    before = real.read_bytes()
    handle = os.open(real.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        for name in (real, link):
            with pytest.raises(LockTimeout):
                merge_entries(name, header(), [fakes.entry(P.replace(work=64))], timeout=0.1)
    finally:
        os.close(handle)
    assert real.read_bytes() == before
    merge_entries(link, header(), [fakes.entry(P.replace(work=64))])
    assert dump(msgspec.structs.replace(load_file(real))) == real.read_bytes() != before
