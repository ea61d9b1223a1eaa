"""A calibration that did not end, and one that is resumed: what is kept, what is measured again, what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bole_runtime.budget import CalibrationError, CalibrationTable, Point, calibrate, load_calibration


def model_us(point: Point) -> float:
    return 100.0 + 2.0 * point.batch + max(0, point.batch * point.nodes - 32) + point.kv / 100 + point.depth


class Machine:
    """A forward that takes model_us, but cannot run some groups or points, or breaks at one."""

    def __init__(
        self,
        refused: tuple[tuple[int, int], ...] = (),
        breaks: tuple[int, int] | None = None,
        points: tuple[Point, ...] = (),
        slower: float = 0.0,
    ) -> None:
        self.refused, self.breaks, self.points, self.slower = refused, breaks, points, slower
        self.made: list[Point] = []

    def __call__(self, point: Point) -> Any:
        self.made.append(point)
        if (point.batch, point.kv) in self.refused or point in self.points:
            return None

        def run() -> float:
            if (point.batch, point.kv) == self.breaks:
                raise RuntimeError("the device is gone")
            return model_us(point) + self.slower

        return run

    def calibrate(self, path: Path | None, resume: bool = False, **changes: Any) -> CalibrationTable:
        sizes: dict[str, Any] = {"batches": [1, 8], "nodes": [4], "kv_lengths": [0, 100], "depths": [3], "repeats": 3}
        return calibrate(
            self, **{**sizes, **changes}, name="toy", device="cpu", path=path, resume=resume, timer=lambda run: run()
        )  # fmt: skip


def test_what_is_finished_is_kept_and_resumed(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    broken = Machine(breaks=(8, 0))
    message = r"batch 8, kv 0: RuntimeError: the device is gone \(what is whole is in .*table\.json; the same call "
    with pytest.raises(CalibrationError, match=message + r"with resume=True measures the rest\)") as caught:
        broken.calibrate(path)
    assert isinstance(caught.value.__cause__, RuntimeError)
    kept = load_calibration(path)
    assert caught.value.table is not None
    assert kept.entries == caught.value.table.entries
    assert [(e.batch, e.kv, e.nodes) for e in kept.entries] == [(1, 0, 1), (1, 0, 4), (1, 100, 1), (1, 100, 4)]
    assert kept.protocol.endswith("; incomplete: 2 of 4 groups")
    # The rest alone is run, and the table is that of one run.
    well = Machine()
    table = well.calibrate(path, resume=True)
    assert {(p.batch, p.kv) for p in well.made} == {(8, 0), (8, 100)}
    whole = Machine().calibrate(tmp_path / "other.json")
    assert table.entries == load_calibration(path).entries == whole.entries
    assert table.protocol == load_calibration(path).protocol == whole.protocol
    done = Machine()
    assert done.calibrate(path, resume=True).entries == whole.entries
    assert not done.made


def test_groups_that_cannot_decode_are_left_out_and_named(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    message = r"cannot run at batch 1, kv 100: .*; decoding cannot run at batch 8, kv 100: forward gave None \(what is"
    with pytest.raises(CalibrationError, match=message) as caught:
        Machine(refused=((1, 100), (8, 100))).calibrate(path)
    assert caught.value.table is not None
    assert {(e.batch, e.kv) for e in load_calibration(path).entries} == {(1, 0), (8, 0)}
    with pytest.raises(CalibrationError, match="resumed") as caught:
        Machine(breaks=(8, 0)).calibrate(None)
    assert caught.value.table is not None
    with pytest.raises(CalibrationError, match="nothing was measured") as caught:
        Machine(breaks=(1, 0)).calibrate(None)
    assert caught.value.table is None


def test_a_group_that_grows_is_timed_together(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    Machine().calibrate(path, batches=[1])
    more = Machine(refused=((8, 100),))
    with pytest.raises(CalibrationError, match="batch 8, kv 100"):
        more.calibrate(path, resume=True, nodes=[16], kv_lengths=[100])
    assert {(p.nodes, p.depth) for p in more.made if p.batch == 1} == {(16, 3), (4, 3), (1, 0)}
    table = load_calibration(path)
    assert table.nodes(1, 100) == [1, 4, 16]
    assert table.nodes(1, 0) == [1, 4]


def test_only_the_same_calibration_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    sizes: dict[str, Any] = {"batches": [1], "nodes": [4], "kv_lengths": [0], "device": "cpu", "repeats": 3}
    with pytest.raises(ValueError, match="resume: there is nothing to resume without path"):
        calibrate(lambda p: None, **sizes, resume=True)
    with pytest.raises(TypeError, match="resume: expected a bool, got str"):
        calibrate(lambda p: None, **sizes, resume="yes")  # type: ignore[arg-type]
    for change, message in (
        ({"name": "other"}, "resume: name of .* is 'toy', not 'other'"),
        ({"name": "toy", "repeats": 7}, "resume: protocol of .* is 'median of 3 runs after 3, .*, not 'median of 7"),
    ):
        Machine().calibrate(path)
        before = path.read_bytes()
        with pytest.raises(ValueError, match=message):
            calibrate(lambda p: lambda: None, **{**sizes, **change}, path=path, resume=True)
        assert path.read_bytes() == before
    path.write_text("{")
    with pytest.raises(CalibrationError, match=r"table\.json"):
        calibrate(lambda p: lambda: None, **sizes, path=path, resume=True)
    assert path.read_text() == "{"


def times(table: CalibrationTable) -> dict[Point, float]:
    return {Point(e.batch, e.nodes, e.kv, e.depth): e.median_us for e in table.entries}


def test_a_measured_point_that_cannot_run_now_keeps_its_time(tmp_path: Path) -> None:
    path, group = tmp_path / "table.json", {"batches": [1], "kv_lengths": [0]}
    Machine().calibrate(path, **group, nodes=[4, 16])
    refused = Point(1, 4, 0, 3)
    table = Machine(points=(refused,), slower=50.0).calibrate(path, resume=True, **group, nodes=[4, 16, 64])
    assert times(table) == times(load_calibration(path))
    # All others were timed again, together with the new one.
    again = [Point(1, 1, 0, 0), Point(1, 16, 0, 3), Point(1, 64, 0, 3)]
    assert times(table) == {refused: model_us(refused), **{p: model_us(p) + 50.0 for p in again}}
    assert "incomplete" not in table.protocol


def test_new_nodes_are_missing_where_decoding_cannot_run_now(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    before = Machine().calibrate(path)
    decoding, large = Point(1, 1, 100, 0), Point(1, 64, 100, 3)
    message = (
        r"^decoding cannot run at batch 1, kv 100: forward gave None, missing: 8 nodes of depth 3, 16 nodes of depth 3 "
        r"\(what is whole is in .*resume=True measures the rest\)$"
    )
    with pytest.raises(CalibrationError, match=message) as caught:
        Machine(points=(decoding, large)).calibrate(path, resume=True, nodes=[8, 16, 64])
    assert caught.value.table is not None
    kept = load_calibration(path)
    assert times(kept) == times(caught.value.table)
    assert kept.protocol == caught.value.table.protocol == before.protocol + "; incomplete: 3 of 4 groups"
    # All other groups were measured; this one is as it was.
    assert kept.nodes(1, 100) == [1, 4]
    assert kept.nodes(8, 100) == kept.nodes(1, 0) == [1, 4, 8, 16, 64]
    assert times(before).items() <= times(kept).items()
    table = Machine().calibrate(path, resume=True, nodes=[8, 16, 64])
    assert table.nodes(1, 100) == [1, 4, 8, 16, 64]
    assert table.protocol == before.protocol


def test_decoding_that_cannot_run_now_is_no_error_where_nothing_else_can(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    before = Machine().calibrate(path)
    table = Machine(refused=((1, 100),)).calibrate(path, resume=True, nodes=[16])
    assert table.nodes(1, 100) == [1, 4]
    assert table.protocol == before.protocol


def test_a_larger_grid_that_breaks_says_so_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    Machine().calibrate(path)
    with pytest.raises(CalibrationError, match="batch 1, kv 0: RuntimeError: the device is gone"):
        Machine(breaks=(1, 0)).calibrate(path, resume=True, nodes=[4, 16])
    assert load_calibration(path).protocol.endswith("; incomplete: 0 of 4 groups")
    assert len(load_calibration(path).entries) == 8


def test_a_file_that_cannot_be_written_any_more_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    message = r"batch 1, kv 0: OSError: disk full \(what is whole is the error's table alone: .*cannot be written: disk"
    with pytest.raises(CalibrationError, match=message) as caught:
        Machine().calibrate(tmp_path / "table.json")
    assert caught.value.table is not None
    assert caught.value.table.nodes(1, 0) == [1, 4]
    assert not list(tmp_path.iterdir())
