"""Where a calibration may be written, and what may be: checked before anything runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bole_runtime.budget import CalibrationError, CalibrationTable, Point, calibrate, load_calibration, save_calibration

SIZES: dict[str, Any] = {"batches": [1], "nodes": [4], "kv_lengths": [8], "device": "cpu", "warmup": 0, "repeats": 3}


@pytest.fixture
def table() -> CalibrationTable:
    return calibrate(lambda _: lambda: None, **SIZES)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"name": "two\nlines"}, ValueError, "name: 'two.nlines' is not allowed"),
        ({"name": "a\ud800"}, ValueError, r"name: 'a.ud800' is not allowed; allowed: .* that UTF-8 can hold"),
        ({"name": 5}, TypeError, "name: 5 is not allowed"),
        ({"path": "folder"}, ValueError, "path: .* is a folder"),
        ({"path": "file/below.json"}, OSError, "file"),
        ({"path": "a" * 256}, ValueError, "path: .*aaa' is not allowed: File name too long"),
        ({"path": "a" * 256 + "/t.json"}, ValueError, "path: .* is not allowed: File name too long"),
        ({"path": "a\0b"}, ValueError, "path: .* is not allowed: .*null"),
        ({"path": "a\ud800"}, ValueError, "path: .* is not allowed: .*surrogates"),
        ({"path": "fifo"}, ValueError, "path: .*fifo is no regular file; allowed: a new file, a regular file, or a li"),
        ({"path": "to_fifo"}, ValueError, "path: .*to_fifo is no regular file"),
        ({"path": "to_folder"}, ValueError, "path: .*to_folder is a folder"),
        ({"path": "to_nothing"}, ValueError, "path: .*to_nothing is a link to nothing; allowed"),
        ({"path": "loop"}, ValueError, "path: .*loop' is not allowed: .*symbolic links"),
        ({"path": 5}, TypeError, "path: expected a path, got int"),
        ({"batches": [1 << 40]}, ValueError, "batches: .* from 1 to 2147483648"),
        ({"nodes": 5}, TypeError, "nodes: expected a list or tuple of integers, got int"),
        ({"repeats": 3.5}, TypeError, "repeats: expected an int, got float"),
        ({"progress": "loud"}, TypeError, "progress: expected a function, got str"),
    ],
)
def test_what_could_not_be_written_is_refused_before_anything_runs(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    for link, leads in (("to_fifo", "fifo"), ("to_folder", "folder"), ("to_nothing", "nothing"), ("loop", "loop")):
        (tmp_path / link).symlink_to(leads)
    before = {p.name: p.lstat().st_ino for p in tmp_path.iterdir()}
    runs: list[Point] = []
    path = change.get("path")
    if isinstance(path, str):
        change = {"path": tmp_path / path}
    with pytest.raises(error, match=message):
        calibrate(lambda point: lambda: runs.append(point), **{**SIZES, **change})
    assert not runs
    assert {p.name: p.lstat().st_ino for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("changes", [{"date": "yesterday"}, {"name": "a\ud800"}, {"device": "two\nlines"}])
def test_a_table_that_no_file_may_hold_is_not_written(
    table: CalibrationTable, tmp_path: Path, changes: dict[str, str]
) -> None:
    made = CalibrationTable(table.entries, **{"name": "", "device": "", "date": "2026-01-01", **changes})
    with pytest.raises(CalibrationError, match=r"table\.json: cannot be written: "):
        save_calibration(made, tmp_path / "table.json")
    assert not (tmp_path / "table.json").exists()


@pytest.mark.parametrize("name", ["a" * 255, "\N{GREEK SMALL LETTER BETA}" * 125 + ".json"])
def test_a_file_may_have_the_longest_name(tmp_path: Path, name: str) -> None:
    table = calibrate(lambda _: lambda: None, **SIZES, path=tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert load_calibration(tmp_path / name).entries == table.entries


def test_a_link_stays_and_the_file_it_leads_to_is_replaced(table: CalibrationTable, tmp_path: Path) -> None:
    target, link, second = tmp_path / "there" / "table.json", tmp_path / "here" / "link.json", tmp_path / "second"
    save_calibration(table, target)
    link.parent.mkdir()
    link.symlink_to("../there/table.json")
    second.symlink_to(link)
    for path, nodes in ((link, 8), (second, 16)):
        made = calibrate(lambda _: lambda: None, **{**SIZES, "nodes": [4, nodes]}, path=path, resume=True)
        assert made.nodes(1, 8)[-1] == nodes
        assert link.is_symlink()
        assert second.is_symlink()
        assert not target.is_symlink()
        assert load_calibration(target).entries == made.entries
    for folder, name in ((target.parent, "table.json"), (link.parent, "link.json")):
        assert [p.name for p in folder.iterdir()] == [name]


def test_save_calibration_replaces_no_fifo_and_no_dead_link(table: CalibrationTable, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dead").symlink_to("nothing")
    for name, message in (("fifo", "fifo is no regular file"), ("dead", "dead is a link to nothing")):
        with pytest.raises(ValueError, match=message):
            save_calibration(table, tmp_path / name)
    assert (tmp_path / "fifo").is_fifo()
    assert (tmp_path / "dead").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2
