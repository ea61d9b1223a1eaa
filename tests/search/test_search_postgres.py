"""Several runs on one study in a real PostgreSQL server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import postgres
import pytest
import search_sim as sim

from bole_codegen.search.journal import open_storage
from bole_codegen.search.simulate import Surface
from bole_codegen.search.targets import classes

_WHY = postgres.missing()
#: CI sets it: a server that is missing there is a failure, no test left out in silence.
_REQUIRED = bool(os.environ.get("BOLE_REQUIRE_POSTGRESQL"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(_WHY is not None and not _REQUIRED, reason=_WHY or "")]

CHOSEN = sim.targets(batches=[1, 64], nodes=[16, 32, 64])
OPTIONS: dict[str, Any] = {"trials": 12, "rounds": 3, "workers": 2}
#: Evaluations that a group has in the storage when the run that searches it is killed; of some 20.
ENOUGH = 7

# Says what it evaluates before it does.
_RUN = """
import sys; sys.path[:] = eval(sys.argv[1])
import search_sim as sim
import test_search_postgres as test
from bole_codegen.search.simulate import Surface
s = sim.Simulation(sys.argv[2], Surface(seed=7), factor=0.06, **test.OPTIONS)
log = open(sys.argv[3], "a", buffering=1)
screen, quick = s.evaluator.screen, s.evaluator.quick
async def logged_screen(problem, config, keep=False):
    print("check", problem.key(), config, sep="|", file=log)
    return await screen(problem, config, keep)
async def logged_quick(target, config, device):
    print("time", target.problem.key(), config, sep="|", file=log)
    return await quick(target, config, device)
s.evaluator.screen, s.evaluator.quick = logged_screen, logged_quick
print("ready", flush=True); sys.stdin.readline()
s.run(test.CHOSEN)
print(repr(sorted(s.table().items())))
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    if _WHY is not None:
        pytest.fail(f"{_WHY}, and BOLE_REQUIRE_POSTGRESQL is set")
    with postgres.server() as found:
        yield found.url


@dataclass
class Run:
    """A search in a process of its own."""

    process: subprocess.Popen[str]
    log: Path

    @classmethod
    def start(cls, url: str, log: Path) -> Run:
        here = str(Path(__file__).parent)
        command = [sys.executable, "-c", _RUN, repr([here, *sys.path]), url, str(log)]
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True), log)

    def wait(self) -> None:
        """Wait until it is ready to search."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def go(self) -> None:
        """Let it search."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def evaluated(self) -> Counter[tuple[str, ...]]:
        """Return (stage, key, configuration) of everything that it began to evaluate, with how often it did."""
        return Counter(tuple(line.split("|", 2)) for line in self.log.read_text().splitlines())


class Study:
    """What is in the storage, as a bystander sees it."""

    def __init__(self, url: str) -> None:
        self._storage = open_storage(url)
        self._store = sim.Simulation(url, Surface(seed=7), **OPTIONS).env.store
        self._groups = {self._store.class_name(p): (p, members) for p, members in classes(CHOSEN).items()}

    def owners(self) -> dict[str, int]:
        """Return the process that searches each group that is being searched."""
        found = {}
        for study in self._storage.get_all_studies():
            kind, _, claimed = study.study_name.partition("/")
            owner = study.user_attrs.get("owner") or {}
            if kind == "claim" and "pid" in owner:
                found[claimed.rpartition("/")[0]] = owner["pid"]
        return found

    def claims(self, group: str) -> int:
        """Return how often a group was claimed."""
        return sum(s.study_name.startswith(f"claim/{group}/") for s in self._storage.get_all_studies())

    def stored(self, group: str) -> Counter[tuple[str, ...]]:
        """Return (stage, key, configuration) of the finished evaluations of a group."""
        _, members = self._groups[group]
        found = [(t, record) for t in members for _, record in self._store.load(t)]
        return Counter((r.stage, t.problem.key(), str(r.config)) for t, r in found)

    def finished(self, group: str) -> bool:
        """Return whether every bucket of a group has its result."""
        return all(self._store.final(t) is not None for t in self._groups[group][1])

    def screened(self, group: str) -> set[tuple[str, ...]]:
        """Return what need not be compiled and checked again, since it was timed or had failed."""
        problem, _ = self._groups[group]
        return {("check", problem.key(), config) for _, _, config in self.stored(group)}

    @property
    def groups(self) -> list[str]:
        """Names of all groups."""
        return list(self._groups)


def _until_enough(study: Study, runs: dict[int, Run]) -> int:
    """Wait until both runs search, and one has stored enough of an unfinished group; return its process."""
    limit = time.monotonic() + 120
    while time.monotonic() < limit:
        owners = study.owners()
        assert all(r.process.poll() is None for r in runs.values()), "a run was over before one of them was killed"
        for group, pid in owners.items():
            if set(owners.values()) == set(runs) and study.stored(group).total() >= ENOUGH:
                return pid
        time.sleep(0.02)
    raise AssertionError("no group has so many evaluations")


def test_runs_on_one_database_share_the_work_and_survive_a_kill(url: str, tmp_path: Path) -> None:
    started = [Run.start(url, tmp_path / name) for name in ("first", "second")]
    runs = {r.process.pid: r for r in started}
    study = Study(url)
    try:
        # Together: one that is late to start would find nothing to do on a busy machine.
        for step in (Run.wait, Run.go):
            for run in started:
                step(run)
        killed = _until_enough(study, runs)
        runs[killed].process.send_signal(signal.SIGKILL)
        runs[killed].process.communicate()
        left = [g for g, pid in study.owners().items() if pid == killed and not study.finished(g)]
        before = {g: (study.stored(g), study.screened(g)) for g in left}
        (survivor,) = (r for r in started if r.process.pid != killed)
        out, _ = survivor.process.communicate(timeout=200)
    finally:
        for run in started:
            run.process.kill()
    assert (runs[killed].process.returncode, survivor.process.returncode) == (-signal.SIGKILL, 0)
    table = out.splitlines()[-1]
    # What the killed one had begun was taken over, and goes on from what it had finished.
    assert left
    assert max(stored.total() for stored, _ in before.values()) >= ENOUGH
    evaluated = survivor.evaluated()
    for group, (stored, screened) in before.items():
        assert study.claims(group) == 2
        assert study.finished(group)
        again = set(evaluated) & (set(stored) | screened)
        assert again == set(), f"finished evaluations of {group} were done again"
        assert study.stored(group).total() > stored.total()
    # Nothing was done twice anywhere, by whichever of them, but what was under way at the kill.
    assert [e for g in study.groups for e, n in study.stored(g).items() if n > 1] == []
    assert [e for e, n in evaluated.items() if n > 1] == []
    alive = [g for g in study.groups if g not in before]
    both = set(evaluated) & set(runs[killed].evaluated())
    assert not {e for e in both if any(e in study.stored(g) for g in alive)}
    # A third run finds all of it there.
    last = sim.Simulation(url, Surface(seed=7), **OPTIONS)
    result = last.run(CHOSEN)
    assert last.evaluator.evaluations == 0
    assert all(b.reused for b in result.buckets)
    assert repr(sorted(last.table().items())) == table
    assert {key for key, _ in eval(table)} == {t.problem.key() for t in CHOSEN}
