"""The round benchmark: its table, its bytes, its refusals, and its rounds on a CPU."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import bench_round
import pytest
import torch
from peers import PeerUnavailable
from peers.sglang_scatter import load_scatter
from round_bench.report import RoundRow, cells, format_table, save
from round_bench.rounds import round_bytes, serial_bytes
from round_bench.timing import summarise

from bole_codegen.measure import Workload

ROWS = [
    RoundRow(8, 16, "eager", us=500.0, spread_us=2.0, bytes=1.2e9, workspace=40_000_000, error=3e-7),
    RoundRow(8, 16, "deferred", status="wrong: error 1e-1 against fp64, bound 1e-6"),
    RoundRow(8, 16, "sglang", us=2500.0, bytes=9e9, workspace=6_400_000_000, error=1e-3),
    RoundRow(1, 16, "eager", us=100.0),
]


def test_ratios_are_over_the_peer_of_the_same_point() -> None:
    eager = cells(ROWS[0], ROWS, 4000.0)
    assert (eager["x sglang"], eager["MB"], eager["/floor"], eager["workspace MB"]) == ("5.0x", "1200", "1.67", "40.0")
    assert cells(ROWS[2], ROWS, 4000.0)["x sglang"] == "-"
    assert cells(ROWS[3], ROWS, 4000.0)["x sglang"] == "-"
    assert cells(ROWS[0], ROWS, None)["/floor"] == "-"
    text = format_table(ROWS, 4000.0)
    assert "B8 N16 deferred: wrong: error 1e-1" in text
    assert len(text.splitlines()) == 6
    assert format_table([], None) == "no rows"


def test_files(tmp_path: Path) -> None:
    save(ROWS, {"seed": 1}, tmp_path / "rows.csv", tmp_path / "rows.json")
    saved = json.loads((tmp_path / "rows.json").read_text())
    assert saved["provenance"] == {"seed": 1}
    assert saved["rows"][0]["us"] == 500.0
    with (tmp_path / "rows.csv").open() as file:
        assert [r["what"] for r in csv.DictReader(file)] == ["eager", "deferred", "sglang", "eager"]


def test_bytes_of_a_round() -> None:
    work = Workload(64, 16, 16, 32)
    state, layers, counts = 64 * 2 * 2**20, 24, [4] * 64
    eager, fused = (round_bytes(work, layers, p, counts, 1) for p in ("eager", "fused"))
    deferred = round_bytes(work, layers, "deferred", counts, 9)
    # A state is read twice and written once, or read once and in every ninth round twice and written once.
    assert eager > 3 * layers * state > deferred > layers * state * (1 + 2 / 9)
    assert fused - eager == 2 * layers * 256 * work.factor_bytes_per_node
    # A chain that is never kept is an eager commit.
    assert round_bytes(work, layers, "deferred", counts, 1) == eager
    assert serial_bytes(work, layers, 64) > layers * 17 * state
    assert serial_bytes(work, layers, 64) / deferred > 5


def test_times_are_a_round_of_a_cycle() -> None:
    assert summarise([900.0], 9) == summarise([100.0], 1)
    time = summarise([90.0, 99.0, 81.0, 90.0], 9)
    assert time.median_us == 10.0
    assert time.spread_us > 0


def test_a_model_gives_its_layers() -> None:
    geometry, layers = bench_round.geometry_of("Qwen3.5-9B", 2)
    assert (geometry.key_heads, geometry.value_heads, geometry.dk, geometry.dv, layers) == (8, 16, 128, 128, 24)
    with pytest.raises(ValueError, match="unknown model"):
        bench_round.geometry_of("qwen0", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "lazy"], "--policy: 'lazy' is not one of eager, fused, deferred"),
        (["--replays", "3"], "at least 10"),
        (["--accepted", "0"], "allowed: whole numbers, 1 or more"),
        (["--model", "qwen0"], "--model: unknown model"),
    ],
)
def test_arguments_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_round.main(arguments)
    assert message in capsys.readouterr().err


def test_help_and_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_round.main([]) == 2
    assert "no CUDA device is available" in capsys.readouterr().err
    assert "--check-only" in bench_round.build_parser().format_help()


def test_rounds_are_checked_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--tp", "16", "--layers", "2", "--batch", "2", "--nodes", "6", "--in-dtype", "fp32", "--seed", "3"]
    assert bench_round.main([*small, "--check-only", "--json", str(tmp_path / "rows.json"), "--sglang", "nowhere"]) == 1
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [r["what"] for r in rows] == ["eager", "fused", "deferred"]
    assert all(r["status"] == "ok" and r["error"] < 1e-6 and r["us"] is None for r in rows)
    assert rows[0]["workspace"] < rows[1]["workspace"] == rows[2]["workspace"]
    assert "peer sglang is not available" in capsys.readouterr().out


def test_a_wrong_state_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = bench_round.BoleRound.run

    def spoiled(made: bench_round.BoleRound) -> None:
        run(made)
        made.manager.request.pools[0].mul_(1.001)

    monkeypatch.setattr(bench_round.BoleRound, "run", spoiled)
    small = ["--tp", "16", "--layers", "1", "--batch", "1", "--nodes", "4", "--in-dtype", "fp32", "--policy", "eager"]
    assert bench_round.main([*small, "--check-only"]) == 1
    assert "eager: wrong: error" in capsys.readouterr().out


def test_the_scatter_is_found_or_its_absence_explained(tmp_path: Path) -> None:
    with pytest.raises(PeerUnavailable, match="no --sglang PATH given"):
        load_scatter(None, tmp_path)
    with pytest.raises(PeerUnavailable, match=r"holds no sglang/kernels/ops/mamba/mamba_state_scatter_triton\.py"):
        load_scatter(str(tmp_path), tmp_path)
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"not a wheel")
    with pytest.raises(PeerUnavailable, match=r"x\.whl holds no"):
        load_scatter(str(wheel), tmp_path)
    package = tmp_path / "sglang" / "kernels" / "ops" / "mamba"
    package.mkdir(parents=True)
    file = package / "mamba_state_scatter_triton.py"
    file.write_text(
        "from sglang.kernels.ops.memory.ptr_table import make_ptr_table\n"
        "from sglang.srt.utils.common import get_device_core_count\n"
        "def fused_mamba_state_scatter_with_mask(*arguments):\n    return len(arguments)\n"
    )
    for path in (tmp_path, tmp_path / "sglang"):
        assert load_scatter(str(path), tmp_path)(1, 2, 3, 4) == 4
    file.write_text("raise RuntimeError('odd')\n")
    with pytest.raises(PeerUnavailable, match="does not load: RuntimeError: odd"):
        load_scatter(str(tmp_path), tmp_path)
    file.write_text("")
    with pytest.raises(PeerUnavailable, match="has no fused_mamba_state_scatter_with_mask"):
        load_scatter(str(tmp_path), tmp_path)
