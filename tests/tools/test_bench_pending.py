"""The benchmark over pending tokens and with peers that commit: checks for real, no timing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import bench_verify
import pytest
import torch
from verify_bench import commit, measure, oracle, pending, table
from verify_bench.grid import Point
from verify_bench.settings import Settings

from bole_codegen.measure import Timing

POINT = Point(3, 4, "chain", 2, 4, 16, 16, "bf16", "fp32", "bf16", "raw", "captured", pending=6)
needs_cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")


class Ring:
    """A peer that answers from the oracle and commits by a call of its own, with a fault on request."""

    name, version, profile, includes, commits = "ring", "1.0", "fast", "verify over a ring", False

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.committed_before: list[bool] = []

    def refuses(self, work) -> str | None:
        return None if work.pending == 6 else f"asked with {work.pending} pending"

    def memory_bytes(self, work) -> int:
        return 0

    def prepare(self, inputs, shape: str, budget: int):
        peer = self

        class Prepared:
            workspace_bytes, launches, state_bound = 5, 1, 1e-6

            def __init__(self) -> None:
                self.pools = [layer.state.clone() for layer in inputs.layers]
                self.outputs: dict[int, torch.Tensor] = {}

            def make_layer(self, index: int) -> Callable[[], object]:
                def launch() -> None:
                    start = pending.roots(inputs, {index})
                    self.outputs[index] = oracle.verify_outputs(start, index).bfloat16()

                return launch

            def output(self, index: int) -> torch.Tensor:
                return self.outputs[index]

            def poison(self) -> None:
                pass

            def make_commit(self, counts: list[int]) -> Callable[[], object]:
                if peer.fault == "raises":
                    raise RuntimeError("no kernel image")
                accepted = torch.tensor(counts, dtype=torch.int32) - 1

                def fold() -> None:
                    # Bole's own commits come later: they change the pools that both began with.
                    peer.committed_before.append(torch.equal(inputs.layers[0].state, first))
                    start = pending.roots(inputs, range(len(self.pools)))
                    for index, pool in enumerate(self.pools):
                        pool[inputs.slots.long()] = oracle.committed_states(start, index, accepted).float()
                    if peer.fault == "wrong":
                        self.pools[0].add_(0.1)

                first = inputs.layers[0].state.clone()
                return fold

            def committed(self, index: int) -> torch.Tensor:
                return self.pools[index][inputs.slots.long()]

        return Prepared()


def settings(peer: Ring) -> Settings:
    return Settings(device="cpu", layers=2, timing=False, peers=[peer])


def test_bole_and_peers_verify_and_commit_over_pending_tokens() -> None:
    peer = Ring()
    row = measure.run_point(POINT, settings(peer), seed=11)
    assert row.note == ""
    assert {name: r.status for name, r in row.results.items()} == dict.fromkeys(("fast", "lossless", "ring"), "ok")
    assert {name: r.status for name, r in row.commit.items()} == dict.fromkeys(("fast", "lossless", "ring"), "ok")
    assert row.results["lossless"].error_fp32 < 5e-6
    assert peer.committed_before == [True]
    names = [cells["candidate"] for cells in table.detail_cells(row)]
    assert names == [
        "fast (verify over 6 pending tokens)", "lossless (verify over 6 pending tokens)", "ring (verify over a ring)"
    ]  # fmt: skip
    assert row.point.title.endswith("raw gates after 6 pending")
    assert "commit ring us" in table.round_cells(row)


@pytest.mark.parametrize(("fault", "status"), [("wrong", "wrong: error"), ("raises", "failed: RuntimeError")])
def test_a_wrong_commit_of_a_peer_is_told(fault: str, status: str) -> None:
    row = measure.run_point(POINT, settings(Ring(fault)), seed=11)
    assert row.commit["ring"].status.startswith(status)
    assert row.commit["fast"].status == "ok"
    assert any("commit ring" in line for line in table.note_lines(row))


def test_a_commit_is_timed_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(make, layers: int, layers_per_launch: int = 1):
        make(0)()
        return nullcontext(layers_per_launch)

    monkeypatch.setattr(commit, "capture_layers", capture)
    monkeypatch.setattr(
        commit,
        "time_interleaved",
        lambda graphs, replays: {n: Timing.from_samples([8.0], g) for n, g in graphs.items()},
    )
    monkeypatch.setattr(measure, "_time_candidates", lambda *args: None)
    monkeypatch.setattr(measure, "_time_build", lambda *args: 3.0)
    timed = settings(Ring())
    timed.timing = True
    row = measure.run_point(POINT, timed, seed=11)
    assert {name: r.us for name, r in row.commit.items()} == dict.fromkeys(("ring", "fast", "lossless"), 4.0)
    for result in row.results.values():
        result.us = 10.0
    # A chain that no tree is built for.
    assert row.round_us("ring") == 14.0
    assert row.round_us("fast") == 15.5


@needs_cpu_only
def test_the_command_takes_pending_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--hk", "2", "--hv", "4", "--dk", "16", "--dv", "16", "--layers", "2", "--check-only"]
    for state in ("fp32", "bf16"):
        args = [*small, "--points", "2x4,2x8", "--shape", "chain", "--pending", "6", "--state-dtype", state]
        assert bench_verify.main(args) == 0, capsys.readouterr().out
    assert "verify over 6 pending tokens" in capsys.readouterr().out
    for bad in (["--pending", "65"], ["--pending", "4", "--family", "kda"]):
        with pytest.raises(SystemExit):
            bench_verify.main([*small, *bad])
        assert "--pending" in capsys.readouterr().err
