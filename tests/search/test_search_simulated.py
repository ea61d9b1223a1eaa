"""What a search finds, costs and survives, on a simulated device: deterministic times, planted faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import search_sim as sim

from bole_codegen.search.driver import OUT_OF_TIME
from bole_codegen.search.finish import Hints
from bole_codegen.search.quality import compare
from bole_codegen.search.simulate import Surface
from bole_codegen.search.space import view_all
from bole_codegen.search.targets import Target
from bole_runtime.kernels.variants import get_variant

FAULTS = {
    "compile": 0.03, "slow": 0.01, "resources": 0.03, "spills": 0.05, "wrong": 0.05, "nan": 0.02, "bounds": 0.02,
    "races": 0.02, "crash": 0.03, "killed": 0.01, "illegal": 0.02, "hang": 0.01, "late wrong": 0.03,
}  # fmt: skip


@pytest.mark.parametrize(("seed", "op"), [(0, "commit"), (1, "commit"), (2, "commit"), (3, "commit"), (0, "verify")])
def test_a_quarter_of_the_evaluations_come_within_three_percent_of_all(tmp_path: Path, seed: int, op: str) -> None:
    # Commits of families that erase have few configurations.
    (target,) = sim.targets(ops=[op], families=["mamba2" if op == "commit" else "gdn"])
    names = ("steps", "path") if op == "commit" else ("fused",)
    trials = 21 if op == "commit" else 30
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


def _evaluations(search: sim.Simulation, chosen: Sequence[Target]) -> dict[str, list[str]]:
    """Return every evaluation that a search has kept, and what it gave, by bucket."""
    store = search.env.store
    return {t.problem.key(): sorted(repr(record) for _, record in store.load(t)) for t in chosen}


def _undisturbed(folder: Path, surface: Surface, chosen: Sequence[Target], **options: Any) -> Any:
    search = sim.Simulation(folder / "undisturbed", surface, **options)
    search.run(chosen)
    return search.table(), _evaluations(search, chosen), search.saved


class _Killed(BaseException):
    """Stands for a kill: nothing but what is in the storage goes on."""


def _run_killed_after(writes: int, search: sim.Simulation, chosen: Sequence[Target]) -> bool:
    """Run until so many evaluations were kept; return whether it was over before."""
    store = search.env.store
    add, left = store.add, iter(range(writes))

    def until(target: Target, record: Any) -> None:
        if next(left, None) is None:
            raise _Killed
        add(target, record)

    store.add = until  # type: ignore[method-assign]
    try:
        search.run(chosen)
    except _Killed:
        return False
    return True


@pytest.mark.parametrize(("seed", "step"), [(7, 7), (8, 13), (9, 30)])
def test_a_search_killed_again_and_again_evaluates_the_same_candidates(tmp_path: Path, seed: int, step: int) -> None:
    # Classes that start from the winners of others, buckets that take over from their neighbours, faults of each kind.
    chosen = sim.targets(batches=[1, 8, 64], nodes=[16, 32, 64])
    surface = Surface(seed=seed, noise=0.01, faulty=FAULTS)
    options: dict[str, Any] = {"trials": 16, "rounds": 4, "anchors": 2, "workers": 2}
    expected = _undisturbed(tmp_path, surface, chosen, **options)
    kills = 0
    while not _run_killed_after(step, sim.Simulation(tmp_path / "killed", surface, **options), chosen):
        kills += 1
        assert kills < 200
    assert kills >= 3
    resumed = sim.Simulation(tmp_path / "killed", surface, **options)
    resumed.run(chosen)
    assert (resumed.table(), _evaluations(resumed, chosen)) == expected[:2]
    assert sorted(resumed.saved, key=repr) == sorted(expected[2], key=repr)


def test_a_search_that_a_budget_ended_goes_on_to_the_same_end(tmp_path: Path) -> None:
    chosen = sim.targets(batches=[1, 8, 64], nodes=[16, 32, 64])
    options: dict[str, Any] = {"trials": 16, "rounds": 4, "anchors": 2, "workers": 2}
    table, evaluations, _ = _undisturbed(tmp_path, Surface(seed=3), chosen, **options)
    for budget in (45.0, 60.0, 75.0):
        result = sim.Simulation(tmp_path / "ended", Surface(seed=3), time_budget=budget, **options).run(chosen)
        assert result.out_of_time
    resumed = sim.Simulation(tmp_path / "ended", Surface(seed=3), **options)
    resumed.run(chosen)
    assert resumed.table() == table
    # Nothing twice; finalists of unfinished rounds were timed beside them.
    found = _evaluations(resumed, chosen)
    assert all(set(evaluations[key]) <= set(found[key]) for key in evaluations)
    assert all(len(set(records)) == len(records) for records in found.values())


def test_more_trials_go_on_from_all_that_is_known(tmp_path: Path) -> None:
    chosen = sim.targets(batches=[1, 64])
    sim.Simulation(tmp_path / "j", trials=12, rounds=3).run(chosen)
    more = sim.Simulation(tmp_path / "j", trials=20, rounds=3)
    result = more.run(chosen)
    assert result.tried <= 20
    assert more.evaluator.evaluations <= 8


def test_a_table_written_meanwhile_changes_no_proposal_but_is_compared_with(tmp_path: Path) -> None:
    (target,) = chosen = sim.targets(batches=[64])
    expected = _undisturbed(tmp_path, Surface(seed=7), chosen, trials=16, rounds=4)
    _run_killed_after(9, sim.Simulation(tmp_path / "killed", Surface(seed=7), trials=16, rounds=4), chosen)
    proposed = expected[1][target.problem.key()]
    variant = get_variant("commit", "steps")
    others = view_all([variant], target.kernels, sim.RECORD.limits())[0].configs
    held = next(c for c in others if not any(repr(c) in record for record in proposed))
    hints = Hints(held, tuple(others[:3]))
    options: dict[str, Any] = {"trials": 16, "rounds": 4, "incumbents": lambda target: hints}
    resumed = sim.Simulation(tmp_path / "killed", Surface(seed=7), **options)
    resumed.run(chosen)
    found = _evaluations(resumed, chosen)[target.problem.key()]
    assert set(proposed) < set(found)
    assert [held] == [r.config for _, r in resumed.env.store.load(target) if repr(r) not in proposed]


@pytest.mark.slow  # Processes that import torch.
def test_killed_three_times_and_resumed_equals_the_undisturbed_run(tmp_path: Path) -> None:
    journal = tmp_path / "killed"
    for i in range(3):
        # Slow enough that a busy machine sees the lines before the run is over.
        child = _start(journal, 0.06)
        assert child.stdout is not None
        child.stdout.readline()
        before, limit = _lines(journal), time.monotonic() + 60
        while _lines(journal) < before + 25 and child.poll() is None and time.monotonic() < limit:
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
    table, evaluations, _ = _undisturbed(tmp_path, Surface(seed=7), chosen, trials=16, rounds=4)
    assert (resumed.table(), _evaluations(resumed, chosen)) == (table, evaluations)


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
