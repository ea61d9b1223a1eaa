"""Workers that raise, die, hang or are poisoned: each is recorded, none stops the others."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bole_codegen.search import pool as pool_module
from bole_codegen.search.ledger import Ledger
from bole_codegen.search.pool import Job, Pool, WorkerStartError
from bole_codegen.search.results import KINDS, Failed

FACTORY = "pool_bench:Bench"
WAYS = [
    ("raise", "error", "ValueError: planted"),
    ("exit", "crash", "exit code 3"),
    ("segfault", "crash", "signal 11"),
    ("kill", "killed", "signal 9"),
    ("hang", "hang", "no answer within 1 s"),
    ("poison", "illegal", "illegal memory access"),
    ("wrong", "wrong", "planted"),
    ("nan", "nan", "planted"),
    ("bounds", "bounds", "planted"),
    ("races", "races", "planted"),
    ("spills", "spills", "planted"),
    ("resources", "resources", "planted"),
    ("compile", "compile", "planted"),
]
#: Kinds that a phase which takes too long ends in: tests of their own.
LATE = {"slow", "busy"}


def test_every_kind_of_failure_is_planted() -> None:
    assert {kind for _, kind, _ in WAYS} | LATE == set(KINDS)


@pytest.mark.parametrize(("how", "kind", "words"), WAYS)
def test_a_bad_candidate_is_recorded_and_the_next_one_runs(how: str, kind: str, words: str) -> None:
    with Pool(FACTORY, {}) as pool:
        bad, good = pool.run([Job("do", (f"fail {how}",), 1.0), Job("do", ("next",), 30.0)])
    assert isinstance(bad, Failed)
    assert bad.kind == kind
    assert words in bad.message
    assert good == "next"


def test_a_phase_has_its_own_limit_and_its_own_kind_of_failure() -> None:
    ledger = Ledger()
    with Pool(FACTORY, {}, ledger=ledger) as pool:
        limits = {"limits": {"compile": 0.3}, "late": {"compile": "slow"}}
        slow, good = pool.run([Job("do", ("slow 60",), 30.0, **limits), Job("do", ("slow 0.05",), 30.0, **limits)])
    assert (slow.kind, slow.message) == ("slow", "no answer within 0.3 s (compile)")
    assert good == "slow 0.05"
    assert ledger.counts["compile"] == 2
    assert 0.3 < ledger.seconds["compile"] < 5.0


def test_a_phase_in_which_no_kernel_runs_blames_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "WAIT_LIMIT", 0.3)
    with Pool(FACTORY, {}) as pool:
        waited, good = pool.run([Job("do", ("fail wait",), 30.0), Job("do", ("next",), 30.0)])
    assert (waited.kind, waited.message, good) == ("busy", "no answer within 0.3 s (wait)", "next")


def test_results_keep_the_order_of_jobs_over_several_workers() -> None:
    words = ["fail wrong", "b", "fail exit", "d"] * 5
    with Pool(FACTORY, {}, count=3) as pool:
        results = pool.run([Job("do", (w,), 30.0) for w in words])
        assert pool.restarts == 5
        assert pool.run([Job("do", ("again",), 30)]) == ["again"]
    assert [r.kind if isinstance(r, Failed) else r for r in results] == ["wrong", "b", "crash", "d"] * 5


def test_a_job_that_nobody_waits_for_is_not_begun() -> None:
    async def main(pool: Pool) -> list[object]:
        first = asyncio.ensure_future(pool.call(Job("do", ("slow 0.3",), 30.0)))
        second = asyncio.ensure_future(pool.call(Job("do", ("fail exit",), 30.0)))
        while pool._workers[0].job is None if pool._workers else True:
            await asyncio.sleep(0.01)
        first.cancel()  # Has begun: it ends unheard.
        second.cancel()  # Has not.
        return [await pool.call(Job("do", ("next",), 30.0))]

    with Pool(FACTORY, {}) as pool:
        assert asyncio.run(main(pool)) == ["next"]
        assert pool.restarts == 0


@pytest.mark.parametrize("options", [{"broken": "no device here"}, {"unknown": 1}])
def test_workers_that_cannot_start_are_one_clear_error(options: dict[str, object]) -> None:
    with Pool(FACTORY, options) as pool, pytest.raises(WorkerStartError, match="could not start"):
        pool.run([Job("do", ("x",), 10.0)])


def test_output_of_candidates_goes_to_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    with Pool(FACTORY, {}, log=str(log)) as pool:
        pool.run([Job("do", ("print",), 10.0)])
    assert log.read_text() == "printed by a candidate\n"
    assert "candidate" not in capfd.readouterr().out


def test_no_worker_outlives_its_pool() -> None:
    async def main(pool: Pool) -> None:
        await asyncio.gather(*(pool.call(Job("do", ("a",), 30.0)) for _ in range(2)))
        hanging = asyncio.ensure_future(pool.call(Job("do", ("fail hang",), 30.0)))
        await asyncio.sleep(0.2)
        hanging.cancel()

    with Pool(FACTORY, {}, count=2) as pool:
        asyncio.run(main(pool))
        ids = [w.process.pid for w in pool._workers]
    for pid in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_hanging_worker_dies_with_its_parent() -> None:
    code = (
        "import asyncio, sys, os; sys.path[:] = eval(sys.argv[1])\n"
        "from bole_codegen.search.pool import Job, Pool\n"
        "async def main():\n"
        f"    pool = Pool({FACTORY!r}, {{}}); await pool.call(Job('do', ('a',), 30.0))\n"
        "    job = asyncio.ensure_future(pool.call(Job('do', ('fail hang',), 30.0)))\n"
        "    await asyncio.sleep(0.3)\n"
        "    print(pool._workers[0].process.pid, flush=True); os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, repr(sys.path)], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    for _ in range(50):
        if not os.path.exists(f"/proc/{pid}") or "zombie" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"worker {pid} is still there")
