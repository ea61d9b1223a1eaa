"""Grid, targets, tables and files of the benchmark, from rows made by hand."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from verify_bench import grid, table
from verify_bench.grid import Point
from verify_bench.rows import Result, Row, row_from_json

FIXED = {
    "hk": 16, "hv": 32, "dk": 128, "dv": 128,
    "in_dtype": "bf16", "out_dtype": "bf16", "gates": "raw", "factors": "captured",
}  # fmt: skip


def make_row(batch: int = 8, nodes: int = 16, serial: float | None = 96.0, fast: float | None = 12.0) -> Row:
    point = next(grid.expand([(batch, nodes)], ["ragged"], ["fp32"], **FIXED))
    row = Row(point, depth=7, layers=12, cold=True, floor_us=4.8, peers=["sglang"], build_us=6.0, commit_floor_us=8.0)
    row.results["fast"] = Result(
        "fast", us=fast, spread_us=0.1, error=1.7e-3, error_fp32=8e-4, variant="two_stage(A=1)"
    )
    row.results["lossless"] = Result("lossless", status="wrong: error 1e-1 against fp64", error=0.1)
    row.results["sglang"] = Result("fast", us=serial, error=1.6e-3, variant="0.5.23")
    row.commit["fast"] = Result("fast", us=9.0, error=1e-7)
    return row


def test_points_and_numbers_parse() -> None:
    assert grid.parse_points("1x16, 64X64") == [(1, 16), (64, 64)]
    assert grid.parse_ints("1,8, 64") == [1, 8, 64]
    for bad in ("", "0", "1,-2", "a"):
        with pytest.raises(ValueError):
            grid.parse_ints(bad)
    for bad in ("", "16", "0x4", "1x", "1x2x3"):
        with pytest.raises(ValueError):
            grid.parse_points(bad)


def test_expansion_is_every_combination_with_sizes_innermost() -> None:
    points = list(grid.expand([(1, 4), (2, 4)], ["chain", "star"], ["fp32", "bf16"], **FIXED))
    assert len(points) == 8
    assert [(p.batch, p.shape, p.state_dtype) for p in points[:3]] == [
        (1, "chain", "fp32"), (2, "chain", "fp32"), (1, "star", "fp32")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "nodes", "profile", "ratio", "deviation", "text"),
    [
        (64, 16, "fast", 20.0, 0.0, "met >=20x"),
        (64, 64, "fast", 44.9, None, "MISSED >=45x"),
        (64, 64, "lossless", 25.0, 0.05, "met >=25x"),
        (1, 16, "lossless", None, None, "no ratio (>=3x)"),
        (8, 16, "fast", 9.0, 0.12, "met >=7x (void: serial +12% from its reference)"),
        (8, 32, "fast", 9.0, 0.0, ""),
    ],
)
def test_verdicts(
    batch: int, nodes: int, profile: str, ratio: float | None, deviation: float | None, text: str
) -> None:
    point = make_row(batch, nodes).point
    assert grid.verdict(point, profile, ratio, deviation) == text


def test_targets_hold_for_their_own_geometry_only() -> None:
    other = next(grid.expand([(64, 16)], ["ragged"], ["bf16"], **FIXED))
    assert grid.verdict(other, "fast", 30.0, None) == ""
    assert grid.reference_deviation(other, 1515.0) is None
    point = make_row(64, 16).point
    assert grid.reference_deviation(point, 1515.0 * 1.2) == pytest.approx(0.2)


def test_ratio_floor_and_round() -> None:
    row = make_row()
    assert row.ratio("fast") == 8.0
    assert row.over_floor("fast") == 2.5
    assert row.round_us("fast") == 12.0 + 9.0 + 0.5
    assert row.ratio("lossless") is None
    assert row.verdict("fast") == "met >=7x"
    assert row.verdict("lossless") == "no ratio (>=5x)"


def test_pinned_variants_stand_in_only_where_nothing_was_dispatched() -> None:
    row = make_row()
    row.results["fast@fused"] = Result("fast", us=5.0)
    assert row.best("fast") is row.results["fast"]
    del row.results["fast"]
    row.results["fast@two_stage"] = Result("fast", us=4.0)
    row.results["fast@broken"] = Result("fast", status="failed: x")
    assert row.best("fast") is row.results["fast@two_stage"]


def test_a_result_without_a_time_never_shows_one() -> None:
    cells = table.cells(make_row())
    assert cells["fast us"] == "12.0"
    assert cells["fast x"] == "8.0x"
    assert cells["lossless us"] == "wrong"
    assert cells["lossless x"] == "-"
    assert cells["err lossless"] == "1.0e-01"
    assert table.note_lines(make_row()) == [
        "  gdn B8 N16 ragged HK16/HV32 128x128 state fp32 raw gates: lossless: wrong: error 1e-1 against fp64"
    ]


def test_tables_format_with_and_without_tabulate(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [table.cells(make_row()), table.cells(make_row(64, 64))]
    with_tabulate = table.format_table(rows)
    monkeypatch.setitem(__import__("sys").modules, "tabulate", None)
    plain = table.format_table(rows)
    for text in (with_tabulate, plain):
        assert len(text.splitlines()) == 4
        assert "8.0x" in text
    assert table.format_table([]) == ""


def test_files_hold_every_row_and_parse_after_each(tmp_path: Path) -> None:
    rows: list[Row] = []
    for batch in (1, 8):
        rows.append(make_row(batch))
        table.save(rows, {"seed": 3}, tmp_path / "x" / "o.csv", tmp_path / "o.json")
        with (tmp_path / "x" / "o.csv").open() as file:
            records = list(csv.DictReader(file))
        assert [r["batch"] for r in records] == [str(r.point.batch) for r in rows]
        assert records[-1]["fast_us"] == "12.0"
        assert records[-1]["lossless_us"] == ""
        saved = json.loads((tmp_path / "o.json").read_text())
        assert saved["provenance"] == {"seed": 3}
        assert len(saved["rows"]) == len(rows)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.json", "x"]


def test_json_round_trip() -> None:
    row = make_row()
    assert row_from_json(json.loads(json.dumps(row.to_json()))) == row


def test_rows_with_other_columns_share_a_csv(tmp_path: Path) -> None:
    empty = Row(Point(1, 4, "star", state_dtype="fp32", **FIXED), note="not run: the budget of 1 s was spent")  # type: ignore[arg-type]
    table.save([make_row(), empty], {}, tmp_path / "o.csv", None)
    with (tmp_path / "o.csv").open() as file:
        records = list(csv.DictReader(file))
    assert records[1]["note"].startswith("not run")
    assert records[1]["fast_us"] == ""


def test_plot_writes_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from verify_bench.plot import roofline

    roofline([make_row(), make_row(64, 64)], 4300.0, "test", tmp_path / "a" / "o.png", peak_tflops=989.0)
    assert (tmp_path / "a" / "o.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to plot"):
        roofline([make_row(serial=None, fast=None)], 4300.0, "test", tmp_path / "b.png")
