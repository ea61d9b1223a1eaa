"""Calibration: what is measured, the file, interpolation, and the two rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bole_runtime.budget import (
    CalibrationError,
    CalibrationTable,
    Point,
    calibrate,
    goodput_nodes,
    load_calibration,
    published_nodes,
    save_calibration,
)


def model_us(point: Point) -> float:
    return 100.0 + 2.0 * point.batch + max(0, point.batch * point.nodes - 32) + point.kv / 100 + point.depth


@pytest.fixture
def table(tmp_path: Path) -> CalibrationTable:
    clock: dict[Any, float] = {}

    def forward(point: Point) -> Any:
        def run() -> None:
            clock["now"] = model_us(point)

        return None if point.batch * point.nodes > 1000 else run

    def timer(run: Any) -> float:
        run()
        return clock["now"]

    return calibrate(
        forward, batches=[1, 8, 64], nodes=[4, 16, 64], kv_lengths=[0, 4000], depths=[2, 8], timer=timer,
        repeats=5, path=tmp_path / "here" / "h200.json", name="toy", device="cpu",
    )  # fmt: skip


def test_what_is_measured(table: CalibrationTable) -> None:
    assert table.batches == [1, 8, 64]
    assert table.nodes(1, 0) == [1, 4, 16, 64]
    assert table.nodes(64, 0) == [1, 4]  # larger ones cannot run
    for e in table.entries:
        assert e.median_us == pytest.approx(model_us(Point(e.batch, e.nodes, e.kv, e.depth)))
        assert (e.spread_us, e.repeats) == (0.0, 5)
        assert e.depth <= e.nodes - 1
    # Four nodes are at most three deep, whatever depth was asked for.
    assert sorted(e.depth for e in table.entries if (e.batch, e.kv, e.nodes) == (1, 0, 4)) == [2, 3]


def test_lookup_goes_upward_and_interpolates_nodes(table: CalibrationTable) -> None:
    assert table.cost(8, 16, 0) == pytest.approx(model_us(Point(8, 16, 0, 8)))
    assert table.cost(5, 16, 1, 5) == pytest.approx(model_us(Point(8, 16, 4000, 8)))
    assert table.cost(8, 16, 0, 1) == pytest.approx(model_us(Point(8, 16, 0, 2)))
    assert table.cost(8, 4, 0, 7) == pytest.approx(model_us(Point(8, 4, 0, 3)))
    middle = (model_us(Point(8, 16, 0, 8)) + model_us(Point(8, 64, 0, 8))) / 2
    assert table.cost(8, 40, 0) == pytest.approx(middle)
    for question, message in (((65, 1, 0), "batch: 65"), ((1, 1, 5000), "kv: 5000"), ((1, 65, 0), "nodes: 65")):
        with pytest.raises(CalibrationError, match=message):
            table.cost(*question)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"depth": 9}, "depth: 9 is above the largest calibrated one, 8"),
        ({"depth": 100}, "depth: 63 is above the largest calibrated one, 8"),
        ({"depth": -1}, "depth: -1 is not allowed; allowed: 0 or more"),
        ({"batch": 0}, "batch: 0 is not allowed; allowed: 1 or more"),
        ({"batch": -3}, "batch: -3 is not allowed"),
        ({"batch": float("nan")}, "batch: nan is not allowed"),
        ({"kv": -1}, "kv: -1 is not allowed; allowed: 0 or more"),
    ],
)
def test_a_question_beyond_the_table_is_an_error(table: CalibrationTable, question: Any, message: str) -> None:
    asked = {"batch": 1, "kv": 0, **question}
    with pytest.raises(CalibrationError, match=message):
        table.nodes(**asked)
    with pytest.raises(CalibrationError, match=message):
        table.cost(nodes=4, **asked)
    with pytest.raises(CalibrationError, match=message):
        published_nodes(table, **asked, eps=10.0)
    with pytest.raises(CalibrationError, match=message):
        goodput_nodes(table, float, **asked)


def test_a_depth_that_no_calibrated_tree_can_have_is_no_question() -> None:
    def forward(point: Point) -> Any:
        return None if (point.nodes, point.depth) == (16, 8) else lambda: None

    sizes: Any = {"batches": [1], "kv_lengths": [0], "device": "cpu", "warmup": 0, "repeats": 3}
    small = calibrate(forward, nodes=[4], depths=[8], **sizes)
    assert small.nodes(1, 0, depth=100) == [1, 4]
    # A size that could not run that deep is left out; another one was calibrated there.
    assert calibrate(forward, nodes=[4, 16, 64], depths=[4, 8], **sizes).nodes(1, 0, depth=8) == [1, 4, 64]


def test_the_published_rule(table: CalibrationTable) -> None:
    # Batch 8: decoding 116; 4 nodes 119 (depth 3); 16 nodes 220.
    assert published_nodes(table, 8, 0, eps=0.1) == 4
    assert published_nodes(table, 8, 0, eps=1.0) == 16
    assert published_nodes(table, 8, 0, eps=100.0) == 64
    assert published_nodes(table, 8, 0, eps=0.0) == 1
    assert published_nodes(table, 1, 0, eps=0.1) == 16  # 102, then 105, 110, 142
    with pytest.raises(ValueError, match=r"eps: -0\.1"):
        published_nodes(table, 8, 0, eps=-0.1)


def test_the_goodput_rule(table: CalibrationTable) -> None:
    def tokens(nodes: int) -> float:
        return 8 * (1 + {1: 0.0, 4: 0.3, 16: 2.5, 64: 2.6}[nodes])

    best, rate = goodput_nodes(table, tokens, 8, 0)
    rates = {n: tokens(n) / table.cost(8, n, 0) * 1e6 for n in table.nodes(8, 0)}
    assert rate == pytest.approx(max(rates.values()))
    assert rates[best] == pytest.approx(rate)
    assert best == 16
    assert goodput_nodes(table, tokens, 8, 0, overhead_us=1e6)[0] == 1
    assert goodput_nodes(table, lambda n: 8.0, 8, 0)[0] == 1
    for bad in (-105.0, -1e-9, float("nan")):
        with pytest.raises(ValueError, match=f"overhead_us: {bad} is not allowed; allowed: 0 or more"):
            goodput_nodes(table, tokens, 8, 0, overhead_us=bad)


def test_the_file_reads_back_and_is_stable(table: CalibrationTable, tmp_path: Path) -> None:
    path = tmp_path / "here" / "h200.json"
    again = load_calibration(path)
    assert again.entries == table.entries
    assert (again.label, again.name, again.device, again.protocol) == ("measured", "toy", "cpu", table.protocol)
    save_calibration(again, tmp_path / "copy.json")
    assert (tmp_path / "copy.json").read_bytes() == path.read_bytes()
    assert [p.name for p in path.parent.iterdir()] == ["h200.json"]  # nothing is left behind


def test_a_failed_write_keeps_the_old_file(
    table: CalibrationTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "here" / "h200.json"
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_calibration(table, path)
    assert path.read_bytes() == before
    assert len(list(path.parent.iterdir())) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.update(schema_version=2), "schema_version: 2 is not 1"),
        (lambda f: f.update(extra=1), "unknown field `extra`"),
        (lambda f: f["entries"][0].update(median_us=-1.0), "median_us"),
        (lambda f: f["entries"][0].update(batch="1"), "batch"),
        (lambda f: f["entries"].append(dict(f["entries"][0])), "two timings"),
        (lambda f: f.update(entries=[e for e in f["entries"] if e["nodes"] > 1]), "no timing of nodes 1"),
        (lambda f: f.update(entries=[]), "at least one timing"),
        (lambda f: f.update(date="today"), "date"),
    ],
)
def test_bad_files_are_refused(table: CalibrationTable, tmp_path: Path, change: Any, message: str) -> None:
    file = json.loads((tmp_path / "here" / "h200.json").read_text())
    change(file)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(file))
    with pytest.raises(CalibrationError, match=message):
        load_calibration(path)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_calibration(tmp_path / "none.json")
    for text in (b"", b"{", b"[" * 100_000, b"\xff"):
        (tmp_path / "x.json").write_bytes(text)
        with pytest.raises(CalibrationError, match=r"x\.json"):
            load_calibration(tmp_path / "x.json")


def test_points_are_timed_in_rotation() -> None:
    order: list[int] = []

    def forward(point: Point) -> Any:
        return lambda: order.append(point.nodes)

    calibrate(forward, batches=[2], nodes=[3, 5], kv_lengths=[0], depths=[4], repeats=3, warmup=1, device="cpu")
    assert order == [1, 3, 5] * 4


def test_calibrate_errors() -> None:
    def options(**changes: Any) -> dict[str, Any]:
        return {"batches": [1], "nodes": [2], "kv_lengths": [0], "device": "cpu", **changes}

    with pytest.raises(ValueError, match="nodes: \\[0\\] is not allowed"):
        calibrate(lambda p: None, **options(nodes=[0]))
    with pytest.raises(ValueError, match="batches: \\[\\]"):
        calibrate(lambda p: None, **options(batches=[]))
    with pytest.raises(ValueError, match="repeats, warmup: 2, 3"):
        calibrate(lambda p: None, **options(repeats=2))
    with pytest.raises(CalibrationError, match="decoding cannot run at batch 1, kv 0"):
        calibrate(lambda p: None, **options())


@pytest.mark.parametrize("time", [float("nan"), -5.0, 1e12])
def test_a_timer_that_gives_no_time_is_reported(time: float) -> None:
    with pytest.raises(
        CalibrationError, match=r"batch 1, kv 8: .*Point\(batch=1, nodes=1, kv=8, depth=0\): the timer gave"
    ):
        calibrate(
            lambda _: lambda: None, batches=[1], nodes=[4], kv_lengths=[8], device="cpu", timer=lambda _: time
        )  # fmt: skip


def test_a_file_of_another_version_is_named_so_whatever_its_fields(table: CalibrationTable, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    save_calibration(table, path)
    data = json.loads(path.read_text())
    del data["label"]
    path.write_text(json.dumps({**data, "schema_version": 2, "novelty": 1}))
    with pytest.raises(CalibrationError, match="schema_version: 2 is not 1; calibrate again"):
        load_calibration(path)
