"""The benchmark end to end on the CPU: checks for real, times with a stand-in for the CUDA graph."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import bench_verify
import pytest
import torch
from peers import PeerRefuses
from verify_bench import candidates, commit, measure, oracle, table
from verify_bench.grid import Point
from verify_bench.settings import DeviceLost, Settings, reason_of

from bole_codegen.measure import CaptureError, Timing, host_overhead_us
from bole_runtime.families import KERNEL_FAMILIES, get_family

SMALL = ["--hk", "2", "--hv", "4", "--dk", "16", "--dv", "8", "--layers", "2", "--seed", "5"]
POINT = Point(3, 9, "ragged", 2, 4, 16, 8, "bf16", "fp32", "bf16", "raw", "captured")
needs_cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")


class FakeGraph:
    """Replays eagerly what a CUDA graph would hold."""

    def __init__(self, launches: list[Callable[[], object]], layers: int) -> None:
        self.launches, self.layers = launches, layers

    def replay(self) -> None:
        for launch in self.launches:
            launch()

    def __enter__(self) -> FakeGraph:
        return self

    def __exit__(self, *error: object) -> None:
        self.launches = []


def fake_capture(make, layers: int, warmup: int = 2, layers_per_launch: int = 1) -> FakeGraph:
    launches = [make(i) for i in range(layers)]
    try:
        for launch in launches:
            launch()
    except Exception as error:
        raise CaptureError(f"warm-up failed: {type(error).__name__}: {error}") from error
    return FakeGraph(launches, layers * layers_per_launch)


def fake_times(graphs: dict[str, FakeGraph], replays: int = 20) -> dict[str, Timing]:
    times = {}
    for name, graph in graphs.items():
        begin = time.perf_counter()
        graph.replay()
        times[name] = Timing.from_samples([(time.perf_counter() - begin) * 1e6], graph.layers)
    return times


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Settings:
    for module in (measure, commit):
        monkeypatch.setattr(module, "capture_layers", fake_capture)
        monkeypatch.setattr(module, "time_interleaved", fake_times)
    monkeypatch.setattr(measure, "host_overhead_us", lambda call: host_overhead_us(call, calls=1, batches=2))
    return Settings(device="cpu", layers=2, bandwidth_gbs=10.0, eager=True)


class TorchPeer:
    """A peer that answers from the oracle, with a fault on request."""

    name, version, profile = "other", "1.0", "fast"
    includes, commits = "verify", False

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def refuses(self, work) -> str | None:
        return "no such head dim" if self.fault == "refuses" else None

    def memory_bytes(self, work) -> int:
        return 10**15 if self.fault == "memory" else 0

    def prepare(self, inputs, shape: str, budget: int):
        peer = self

        if self.fault == "shape":
            raise PeerRefuses("one tree for all")

        class Prepared:
            workspace_bytes, launches = 7, 2

            def __init__(self) -> None:
                self.outputs: dict[int, torch.Tensor] = {}

            def make_layer(self, index: int):
                def launch() -> None:
                    if peer.fault == "raises":
                        raise RuntimeError("no kernel image")
                    if peer.fault == "kills":
                        raise RuntimeError("CUDA error: an illegal memory access was encountered")
                    out = oracle.verify_outputs(inputs, index).bfloat16()
                    if peer.fault == "wrong":
                        out[-1, -1, -1] = 3.0
                    self.outputs[index] = out

                return launch

            def output(self, index: int) -> torch.Tensor:
                return self.outputs[index]

            def poison(self) -> None:
                pass

        return Prepared()


@pytest.mark.parametrize("factors", ["captured", "alias"])
@pytest.mark.parametrize("gates", ["raw", "ready"])
def test_a_point_is_checked_and_timed(timed: Settings, factors: str, gates: str) -> None:
    point = Point(**{**vars(POINT), "factors": factors, "gates": gates})
    timed.peers = [TorchPeer()]
    row = measure.run_point(point, timed, seed=11)
    assert row.note == ""
    assert list(row.results) == ["fast", "lossless", "other"]
    for result in row.results.values():
        assert result.status == "ok"
        assert result.us is not None
        assert result.us > 0
        assert result.error is not None
        assert result.error < 4e-3
    assert row.results["lossless"].error_fp32 < 5e-6
    assert row.results["lossless"].host_us > 0
    assert row.results["other"].workspace_bytes == 7
    assert row.results["other"].launches == 2
    # Nothing captured, so less than Bole's own floor where that captures.
    assert (row.results["other"].floor_us < row.floor_us) == (factors == "captured")
    assert any(cells["candidate"] == "other (verify)" for cells in table.detail_cells(row))
    assert row.ratio("fast") > 0
    assert row.floor_us > 0
    assert row.build_us > 0
    assert {p: r.status for p, r in row.commit.items()} == {"fast": "ok", "lossless": "ok"}
    assert row.round_us("lossless") > row.results["lossless"].us
    assert row.depth > 0


@pytest.mark.parametrize("family", KERNEL_FAMILIES)
def test_every_family_has_a_row(timed: Settings, family: str) -> None:
    modes = get_family(family).modes
    gates = "raw" if "raw" in modes else "ready"
    row = measure.run_point(Point(**{**vars(POINT), "family": family, "gates": gates}), timed, seed=11)
    assert row.note == ""
    assert {name: r.status for name, r in {**row.results, **row.commit}.items()} == {"fast": "ok", "lossless": "ok"}
    assert row.results["lossless"].error_fp32 < 5e-6
    assert table.cells(row)["family"] == family


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("refuses", "refused: no such head dim"),
        ("memory", "does not fit: 1000000.0 GB of its own memory"),
        ("shape", "refused: one tree for all"),
        ("raises", "failed: RuntimeError: no kernel image"),
        ("wrong", "wrong: error"),
    ],
)
def test_a_peer_at_fault_has_a_status_and_no_time(timed: Settings, fault: str, status: str) -> None:
    timed.peers, timed.commit = [TorchPeer(fault)], False
    row = measure.run_point(POINT, timed, seed=11)
    assert row.results["other"].status.startswith(status)
    assert row.results["other"].us is None
    assert row.ratio("fast") is None
    assert row.results["fast"].us is not None


def test_peers_run_at_the_node_counts_asked_for(timed: Settings) -> None:
    timed.peers, timed.commit, timed.peer_nodes = [TorchPeer()], False, [16]
    assert measure.run_point(POINT, timed, 1).results["other"].status.startswith("not asked")


def test_a_broken_device_ends_the_run(timed: Settings) -> None:
    timed.peers = [TorchPeer("kills")]
    with pytest.raises(DeviceLost, match="illegal memory access"):
        measure.run_point(POINT, timed, 1)


def test_a_cause_that_broke_the_device_is_found_behind_a_capture_error() -> None:
    error = CaptureError("capture failed")
    error.__cause__ = RuntimeError("CUDA error: misaligned address")
    with pytest.raises(DeviceLost):
        reason_of(error)
    assert reason_of(ValueError("first\nsecond")) == "failed: ValueError: first"


@pytest.mark.parametrize("fault", ["value", "unwritten", "only in fp32"])
def test_wrong_bole_outputs_are_never_timed(timed: Settings, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    right = candidates.api.verify

    def wrong(*args, **kwargs):
        out, factors = right(*args, **kwargs)
        if kwargs["precision"] == "fast":
            if fault == "value":
                out[0, 1, 2, 3] += 1.0
            elif fault == "unwritten":
                out[2, -1, -1, -1] = float("nan")
            elif out.dtype is torch.float32:
                out *= 1.01
        return out, factors

    monkeypatch.setattr(candidates.api, "verify", wrong)
    timed.commit = False
    row = measure.run_point(POINT, timed, seed=2)
    assert row.results["fast"].status.startswith("wrong")
    assert row.results["fast"].us is None
    assert row.results["lossless"].us is not None


def test_a_wrong_graph_replay_loses_its_time(timed: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stale(FakeGraph):
        def replay(self) -> None:
            return None

    monkeypatch.setattr(
        measure, "capture_layers", lambda make, layers: Stale(fake_capture(make, layers).launches, layers)
    )
    timed.commit = False
    row = measure.run_point(POINT, timed, seed=2)
    assert row.results["fast"].status.startswith("wrong in a graph replay")
    assert row.results["fast"].us is None


@pytest.mark.parametrize("fault", ["state", "other slot"])
def test_a_wrong_commit_is_not_timed(timed: Settings, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    right = commit.api.commit

    def wrong(pools, slots, *args, **kwargs):
        right(pools, slots, *args, **kwargs)
        used = set(slots.tolist())
        target = slots[0] if fault == "state" else next(s for s in range(len(pools[0])) if s not in used)
        pools[0][target] += 0.5

    monkeypatch.setattr(commit.api, "commit", wrong)
    row = measure.run_point(POINT, timed, seed=2)
    assert all(r.status.startswith("wrong") and r.us is None for r in row.commit.values())
    assert row.results["fast"].us is not None


@needs_cpu_only
def test_without_a_gpu_it_says_so_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_verify.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@needs_cpu_only
def test_check_only_runs_on_the_cpu_and_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [*SMALL, "--check-only", "--points", "2x5,1x9", "--shape", "ragged,chain"]
    code = bench_verify.main([*args, "--csv", str(tmp_path / "o.csv"), "--json", str(tmp_path / "o.json")])
    text = capsys.readouterr().out
    assert code == 0, text
    saved = json.loads((tmp_path / "o.json").read_text())
    assert len(saved["rows"]) == 4
    assert saved["provenance"]["seed"] == 5
    assert saved["provenance"]["command"].startswith("python tools/bench_verify.py --hk 2")
    assert len((tmp_path / "o.csv").read_text().splitlines()) == 5
    assert "torch" in text


@needs_cpu_only
def test_a_killed_run_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = bench_verify.run_point, []

    def second_is_killed(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(bench_verify, "run_point", second_is_killed)
    with pytest.raises(KeyboardInterrupt):
        bench_verify.main([*SMALL, "--check-only", "--points", "1x4,2x4", "--csv", str(tmp_path / "o.csv")])
    assert len((tmp_path / "o.csv").read_text().splitlines()) == 2


@needs_cpu_only
def test_one_failing_point_and_a_spent_budget_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_verify, "run_point", lambda *args: 1 / 0)
    assert bench_verify.main([*SMALL, "--check-only", "--points", "1x4"]) == 1
    assert "failed: ZeroDivisionError" in capsys.readouterr().out
    assert bench_verify.main([*SMALL, "--check-only", "--points", "1x4", "--budget-s", "-1"]) == 0
    assert "not run: the budget" in capsys.readouterr().out


@needs_cpu_only
def test_a_missing_peer_is_listed_and_costs_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    args = [*SMALL, "--check-only", "--points", "1x4", "--peers", "sglang", "--no-commit"]
    assert bench_verify.main(args) == 1
    out = capsys.readouterr().out
    assert "peer sglang is not available: no --sglang PATH" in out
    assert "Not compared with sglang, which was asked for: no --sglang PATH" in out.split("Candidates")[1]
    assert bench_verify.main([*args, "--sglang", "/nonexistent"]) == 1
    assert "Not compared with sglang" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--state-dtype", "int8"], "--state-dtype"),
        (["--precision", "exact"], "--precision"),
        (["--peers", "nobody"], "--peers"),
        (["--sglang", "DIR"], "--sglang: no peer of it is asked for; add --peers, of sglang, sglang-dense"),
        (["--peers", "sglang", "--weaver", "DIR"], "--weaver: no peer of it"),
        (["--hv", "3", "--hk", "2"], "--hv"),
        (["--replays", "3"], "--replays"),
        (["--no-tuned"], "--no-tuned"),
        (["--points", "16"], "--points"),
        (["--variant", "fused"], "--variant"),
        (["--variant", "no_such(A=1)"], "--variant"),
        (["--replot", "x.json"], "--replot"),
    ],
)
def test_bad_arguments_are_named(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench_verify.main(args)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_shapes_split_at_commas_unless_they_are_branching_factors() -> None:
    assert bench_verify._shapes("ragged, chain") == ["ragged", "chain"]
    assert bench_verify._shapes("2,2,2") == ["2,2,2"]
    assert bench_verify._shapes("2,2,2;chain; 3,3,3") == ["2,2,2", "chain", "3,3,3"]


def test_a_printed_configuration_parses_back() -> None:
    from bole_runtime.kernels import GpuLimits, Problem, default_config

    problem = Problem("verify", "gdn", 128, 128, 2, "bf16", "fp32", "raw", "fast", 16, 8, 0, 2048)
    config = default_config(problem, GpuLimits((9, 0), 132, 232448, 60 << 20, 4800.0))
    assert candidates.parse_config(str(config)) == config


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_every_candidate_is_right_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--points", "2x16", "--layers", "3", "--replays", "10", "--stages", "--eager"]
    code = bench_verify.main([*args, "--json", str(tmp_path / "o.json")])
    assert code == 0, capsys.readouterr().out
    (row,) = json.loads((tmp_path / "o.json").read_text())["rows"]
    for result in [*row["results"].values(), *row["commit"].values()]:
        assert result["status"] == "ok"
        assert result["us"] > 0
    assert row["results"]["fast"]["stages"]
    assert row["results"]["fast"]["host_us"] > 0
    assert row["build_us"] > 0
    assert row["floor_us"] < row["results"]["fast"]["us"]
