"""Workers that raise, die, hang or are poisoned: each is recorded, none stops the others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bole_codegen.search.pool import Job, Pool, WorkerStartError
from bole_codegen.search.results import Failed

FACTORY = "pool_bench:Bench"
WAYS = [
    ("raise", "error", "ValueError: planted"),
    ("exit", "crash", "exit code 3"),
    ("segfault", "crash", "signal 11"),
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


@pytest.mark.parametrize(("how", "kind", "words"), WAYS)
def test_a_bad_candidate_is_recorded_and_the_next_one_runs(how: str, kind: str, words: str) -> None:
    with Pool(FACTORY, {}) as pool:
        bad, good = pool.run([Job("do", (f"fail {how}",), 1.0), Job("do", ("next",), 30.0)])
    assert isinstance(bad, Failed)
    assert bad.kind == kind
    assert words in bad.message
    assert good == "next"


def test_results_keep_the_order_of_jobs_over_several_workers() -> None:
    seen = []
    words = ["fail wrong", "b", "fail exit", "d"] * 5
    with Pool(FACTORY, {}, count=3) as pool:
        jobs = [Job("do", (w,), 30.0, i) for i, w in enumerate(words)]
        results = pool.run(jobs, lambda job, result: seen.append(job.tag))
        assert pool.restarts == 5
        assert pool.call("do", "again", limit=30) == "again"
    assert [r.kind if isinstance(r, Failed) else r for r in results] == ["wrong", "b", "crash", "d"] * 5
    assert sorted(seen) == list(range(20))


def test_stop_leaves_the_rest_undone() -> None:
    done: list[object] = []
    with Pool(FACTORY, {}) as pool:
        results = pool.run([Job("do", (w,), 30.0) for w in "abc"], lambda job, r: done.append(r), lambda: bool(done))
    assert results == ["a", None, None]


@pytest.mark.parametrize("options", [{"broken": "no device here"}, {"unknown": 1}])
def test_workers_that_cannot_start_are_one_clear_error(options: dict[str, object]) -> None:
    with Pool(FACTORY, options) as pool, pytest.raises(WorkerStartError, match="could not start"):
        pool.call("do", "x", limit=10)


def test_output_of_candidates_goes_to_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    with Pool(FACTORY, {}, log=str(log)) as pool:
        pool.call("do", "print", limit=10)
    assert log.read_text() == "printed by a candidate\n"
    assert "candidate" not in capfd.readouterr().out


def test_no_worker_outlives_its_pool() -> None:
    with Pool(FACTORY, {}, count=2) as pool:
        pool.run([Job("do", ("a",), 30.0), Job("do", ("b",), 30.0)])
        ids = [w.process.pid for w in pool._workers]
        pool._send(pool._workers[0], Job("do", ("fail hang",), 30.0))
        time.sleep(0.2)
    for pid in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_hanging_worker_dies_with_its_parent() -> None:
    code = (
        "import sys, os, time; sys.path[:] = eval(sys.argv[1])\n"
        "from bole_codegen.search.pool import Job, Pool\n"
        f"pool = Pool({FACTORY!r}, {{}}); pool.call('do', 'a', limit=30)\n"
        "pool._send(pool._workers[0], Job('do', ('fail hang',), 30.0))\n"
        "print(pool._workers[0].process.pid, flush=True); time.sleep(0.3); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, repr(sys.path)], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    for _ in range(50):
        if not os.path.exists(f"/proc/{pid}") or "zombie" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"worker {pid} is still there")
