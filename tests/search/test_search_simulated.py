"""What a search finds, costs and survives, on a simulated device: deterministic times, planted faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import search_sim as sim

from bole_codegen.search.driver import OUT_OF_TIME
from bole_codegen.search.quality import compare
from bole_codegen.search.simulate import Surface
from bole_runtime.kernels.variants import get_variant

FAULTS = {
    "compile": 0.03, "slow": 0.01, "resources": 0.03, "spills": 0.05, "wrong": 0.05, "nan": 0.02, "bounds": 0.02,
    "races": 0.02, "crash": 0.03, "killed": 0.01, "illegal": 0.02, "hang": 0.01, "late wrong": 0.03,
}  # fmt: skip


@pytest.mark.parametrize(("seed", "op"), [(0, "commit"), (1, "commit"), (2, "commit"), (3, "commit"), (0, "verify")])
def test_a_quarter_of_the_evaluations_come_within_three_percent_of_all(tmp_path: Path, seed: int, op: str) -> None:
    (target,) = sim.targets(ops=[op])
    names = ("steps", "path") if op == "commit" else ("fused",)
    trials = 19 if op == "commit" else 30
    search = sim.Simulation(
        tmp_path / "j", Surface(seed=seed, faulty=FAULTS), variants=sim.few(*names), trials=trials, rounds=3, anchors=1
    )
    result = search.run([target])
    found = sim.jumping(lambda loop: compare(search.env, search.evaluator, result.buckets[0], result.tried, loop=loop))
    assert found.evaluations <= 0.25 * found.points
    assert found.gap <= 0.03
    assert str(found).startswith(f"search: {found.evaluations} of {found.points} candidates")


def test_two_runs_agree_whatever_the_noise(tmp_path: Path) -> None:
    chosen = sim.targets(batches=[1, 8, 64], precisions=["fast", "lossless"])
    times: list[list[float]] = []
    for day in (0, 1):
        search = sim.Simulation(tmp_path / f"{day}", Surface(day=day, noise=0.01), trials=19, rounds=3)
        search.run(chosen)
        times.append([search.true(t) for t in chosen])
    assert all(a == pytest.approx(b, rel=0.02) for a, b in zip(*times, strict=True))


def test_the_same_run_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    chosen = sim.targets(batches=[1, 64], nodes=[16, 32])
    runs = []
    for name in "ab":
        search = sim.Simulation(tmp_path / name, trials=12, rounds=3)
        result = search.run(chosen)
        runs.append((search.table(), [str(c) for s in result.searches for _, c, _ in s.history]))
    assert runs[0][0] == runs[1][0]
    assert sorted(runs[0][1]) == sorted(runs[1][1])


def test_planted_faults_of_every_kind_are_counted_and_never_chosen(tmp_path: Path) -> None:
    chosen = sim.targets(batches=[1, 64], nodes=[16, 32], precisions=["fast", "lossless"])
    surface = Surface(seed=5, faulty=FAULTS)
    search = sim.Simulation(tmp_path / "j", surface, trials=100, rounds=2, faulty_defaults=True)
    result = search.run(chosen)
    assert len(search.saved) == len(chosen)
    for entry in search.saved:
        config = get_variant(entry.op, entry.variant).config(entry.params)
        kind = surface.fault(next(t.kernels for t in chosen if t.problem == entry.problem()), config)
        # What spills is slow, not wrong: the default may spill, and is then compared with.
        assert kind is None or (kind == "spills" and config in search.driver.result.searches[0].defaults.values())
    kinds = {k.removeprefix("late ") for k in FAULTS}
    assert set(result.failures) == kinds
    assert result.spent["device_idle"] > 0


def test_a_budget_holds_and_every_bucket_has_a_result(tmp_path: Path) -> None:
    chosen = sim.targets(batches=[1, 4, 8, 16, 32, 64, 128, 256], nodes=[16, 32, 64])
    result = sim.Simulation(tmp_path / "j", trials=30, rounds=3, anchors=3, time_budget=45.0).run(chosen)
    assert result.seconds <= 45.0
    assert result.out_of_time
    assert [b.reason for b in result.buckets if b.entry is None] == []
    tiny = sim.Simulation(tmp_path / "k", trials=30, time_budget=4.0).run(chosen)
    assert tiny.seconds <= 4.0
    assert {b.reason for b in tiny.buckets if b.entry is None} == {OUT_OF_TIME}
    whole = sim.Simulation(tmp_path / "j", trials=30, rounds=3, anchors=3).run(chosen)
    assert not whole.out_of_time
    assert whole.resumed > 0


def test_every_kernel_is_compiled_once_while_the_device_works(tmp_path: Path) -> None:
    chosen = sim.targets(batches=[1, 64], nodes=[16, 32], precisions=["fast", "lossless"])
    search = sim.Simulation(tmp_path / "j", trials=15, rounds=3)
    result = search.run(chosen)
    assert search.evaluator.ledger.counts["compile"] == len(search.evaluator._compiled)
    assert search.evaluator.evaluations == result.tried
    # Compiling, checking and timing overlap: one after the other they would take longer than the run did.
    spent = result.spent
    alone = spent["compile"] / 14 + spent["device_busy"]
    assert result.seconds < 1.25 * alone
    assert spent["device_busy"] + spent["device_idle"] == pytest.approx(result.seconds, abs=0.05)


def test_two_devices_are_faster_than_one(tmp_path: Path) -> None:
    chosen = sim.targets(batches=[1, 4, 16, 64], nodes=[16, 32, 64], precisions=["fast", "lossless"])
    seconds = []
    for devices in (1, 2):
        search = sim.Simulation(tmp_path / f"{devices}", devices=devices, workers=14 * devices, trials=15, rounds=3)
        seconds.append(search.run(chosen).seconds)
        assert len(search.saved) == len(chosen)
    assert seconds[1] < 0.75 * seconds[0]


_RUN = (
    "import sys; sys.path[:] = eval(sys.argv[1])\n"
    "import search_sim as sim; from pathlib import Path\n"
    "from bole_codegen.search.simulate import Surface\n"
    "chosen = sim.targets(batches=[1, 64], nodes=[16, 32])\n"
    "s = sim.Simulation(sys.argv[2], Surface(seed=7), trials=16, rounds=4, factor=float(sys.argv[3]))\n"
    "print('begun', flush=True); s.run(chosen); print(repr(sorted(s.table().items())))\n"
)


def _start(storage: str | Path, factor: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _RUN, repr(sys.path), str(storage), str(factor)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 30


@pytest.mark.slow  # Processes that import torch.
def test_killed_three_times_and_resumed_is_as_good_as_the_undisturbed_run(tmp_path: Path) -> None:
    journal = tmp_path / "killed"
    for i in range(3):
        # Slow enough that a busy machine sees the thirty lines before the run is over.
        child = _start(journal, 0.06)
        assert child.stdout is not None
        child.stdout.readline()
        before, limit = _lines(journal), time.monotonic() + 60
        while _lines(journal) < before + 30 and child.poll() is None and time.monotonic() < limit:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert child.returncode == -signal.SIGKILL, f"run {i} was over before it was killed"
    resumed = sim.Simulation(journal, Surface(seed=7), trials=16, rounds=4)
    chosen = sim.targets(batches=[1, 64], nodes=[16, 32])
    result = resumed.run(chosen)
    assert result.resumed > 20
    # Nothing that was finished is evaluated again.
    assert resumed.evaluator.evaluations < result.tried
    undisturbed = sim.Simulation(tmp_path / "undisturbed", Surface(seed=7), trials=16, rounds=4)
    undisturbed.run(chosen)
    for target in chosen:
        # What was under way when it was killed is proposed in another round, and has led to something better.
        assert resumed.true(target) <= 1.02 * undisturbed.true(target)


@pytest.mark.slow
def test_four_runs_share_a_storage_and_one_is_killed(tmp_path: Path) -> None:
    journal = tmp_path / "shared"
    children = [_start(journal, 0.05) for _ in range(4)]
    assert children[0].stdout is not None
    children[0].stdout.readline()
    limit = time.monotonic() + 60
    while _lines(journal) < 30 and time.monotonic() < limit:
        time.sleep(0.01)
    os.kill(children[0].pid, signal.SIGKILL)
    tables = []
    for child in children[1:]:
        out, _ = child.communicate(timeout=120)
        assert child.returncode == 0
        tables.append(out.splitlines()[-1])
    children[0].communicate()
    assert tables[0] == tables[1] == tables[2]
    keys = [key for key, _ in eval(tables[0])]
    assert keys == sorted(t.problem.key() for t in sim.targets(batches=[1, 64], nodes=[16, 32]))


def test_a_killed_process_is_gone_before_its_parent_has_noticed() -> None:
    from bole_codegen.search import claims

    child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1)
    assert child.stdout is not None
    child.stdout.readline()
    assert claims._started(child.pid)
    child.kill()
    limit = time.monotonic() + 10
    while claims._started(child.pid) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not claims._started(child.pid)
    child.communicate()


def test_a_claim_of_another_host_holds_until_it_goes_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bole_codegen.search import claims
    from bole_codegen.search.journal import open_storage

    storage = open_storage(str(tmp_path / "j"))
    monkeypatch.setattr(claims, "_host", lambda: "there")
    there = claims.Claims(storage)
    monkeypatch.setattr(claims, "_host", lambda: "here")
    here: Any = claims.Claims(open_storage(str(tmp_path / "j")))
    assert there.take("a")
    assert there.take("a")
    assert not here.take("a")
    assert here.take("b")
    monkeypatch.setattr(claims, "LEASE", 0.05)
    time.sleep(0.1)
    there.beat()
    assert not here.take("a")
    time.sleep(0.1)
    assert here.take("a")
    here.release("a")
    again = claims.Claims(storage)
    assert again.take("a")
