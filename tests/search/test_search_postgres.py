"""Several runs on one study in a real PostgreSQL server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import postgres
import pytest
import search_sim as sim

from bole_codegen.search.journal import StorageError, open_storage
from bole_codegen.search.simulate import Surface

_WHY = postgres.missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(_WHY is not None, reason=_WHY or "")]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="bole-pg-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        with postgres.server(Path(folder)) as found:
            yield found


def test_runs_on_one_database_share_the_work_and_survive_a_kill(url: str) -> None:
    code = (
        "import sys; sys.path[:] = eval(sys.argv[1])\n"
        "import search_sim as sim\n"
        "from bole_codegen.search.simulate import Surface\n"
        "chosen = sim.targets(batches=[1, 64], nodes=[16, 32])\n"
        "s = sim.Simulation(sys.argv[2], Surface(seed=7), trials=12, rounds=3, factor=0.05)\n"
        "print('begun', flush=True); s.run(chosen); print(s.evaluator.evaluations, repr(sorted(s.table().items())))\n"
    )
    command = [sys.executable, "-c", code, repr(sys.path), url]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert children[0].stdout is not None
    children[0].stdout.readline()
    time.sleep(1.5)
    children[0].send_signal(signal.SIGKILL)
    out, _ = children[1].communicate(timeout=200)
    children[0].communicate()
    assert (children[0].returncode, children[1].returncode) == (-signal.SIGKILL, 0)
    count, table = out.splitlines()[-1].split(" ", 1)
    # Not more than everything: two classes of twelve candidates, less what the killed one had finished.
    assert int(count) <= 2 * 12
    again = sim.Simulation(url, Surface(seed=7), trials=12, rounds=3)
    result = again.run(sim.targets(batches=[1, 64], nodes=[16, 32]))
    assert again.evaluator.evaluations == 0
    assert all(b.reused for b in result.buckets)
    assert repr(sorted(again.table().items())) == table


def test_a_wrong_database_is_one_clear_error(url: str) -> None:
    with pytest.raises(StorageError, match="cannot open the postgresql storage"):
        open_storage(url.replace("/postgres", "/nosuch"))
