"""Targets against peers other than the serial kernel, on rows made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from verify_bench import table
from verify_bench.grid import Point
from verify_bench.rows import Result, Row
from verify_bench.targets import peer_target, peer_verdict

POINT = Point(8, 16, "ragged", 16, 32, 128, 128, "bf16", "fp32", "bf16", "raw", "captured")


def make_row(name: str, peer_us: float, point: Point = POINT, commits: bool = False, profile: str = "fast") -> Row:
    row = Row(point, peers=[name], floor_us=6.0)
    row.results["fast"] = Result("fast", us=10.0)
    row.results["lossless"] = Result("lossless", us=20.0)
    row.results[name] = Result(profile, us=peer_us, floor_us=5.0, commits=commits)
    row.commit["fast"] = Result("fast", us=6.0)
    return row


@pytest.mark.parametrize(
    ("name", "shape", "nodes", "target"),
    [
        ("weaver-tf32", "ragged", 64, 3.0),
        ("weaver-tf32x3", "2,2,2", 129, 2.5),
        ("treewy-bf16", "binary", 16, 3.0),
        ("weaver-tf32", "chain", 8, None),
        ("replayssm-ring", "chain", 8, 1.0),
        ("replayssm-fold", "chain", 4, 1.0),
        ("replayssm-ring", "chain", 16, None),
        ("sglang", "ragged", 16, None),
    ],
)
def test_what_is_judged_where(name: str, shape: str, nodes: int, target: float | None) -> None:
    assert peer_target(name, replace(POINT, shape=shape, nodes=nodes)) == target


def test_precisions_meet_their_own() -> None:
    assert peer_verdict(make_row("weaver-tf32", 33.0), "weaver-tf32") == "fast over weaver-tf32: 3.3x met >=3x"
    row = make_row("weaver-tf32x3", 50.0, profile="lossless")
    assert peer_verdict(row, "weaver-tf32x3") == "lossless over weaver-tf32x3: 2.5x MISSED >=3x"
    assert table.verdict_lines([row])[-1] == "  B8 N16 ragged lossless over weaver-tf32x3: 2.5x MISSED >=3x"


def test_a_peer_near_its_floor_makes_a_ratio_void_but_only_a_large_one() -> None:
    assert peer_verdict(make_row("weaver-tf32", 18.0), "weaver-tf32").endswith("MISSED >=3x (void: 3.6 x its floor)")
    chain = replace(POINT, shape="chain", nodes=8)
    assert peer_verdict(make_row("replayssm-ring", 12.0, chain), "replayssm-ring").endswith("1.2x met >=1x")


def test_a_peer_that_commits_is_compared_with_a_verify_and_a_commit() -> None:
    row = make_row("treewy-bf16", 64.0, commits=True)
    assert row.peer_ratio("treewy-bf16") == 4.0
    assert peer_verdict(row, "treewy-bf16") == "fast verify and commit over treewy-bf16: 4.0x met >=3x"
    assert row.ratio("fast") == 4.0
    assert row.ratio("lossless") is None
    row.commit.clear()
    assert peer_verdict(row, "treewy-bf16") == "fast verify and commit over treewy-bf16: no ratio (>=3x)"


def test_a_row_has_the_ratio_of_every_peer() -> None:
    flat = make_row("weaver-tf32", 33.0).flat()
    assert flat["weaver-tf32_ratio"] == pytest.approx(3.3)
    assert flat["weaver-tf32_launches"] is None
