"""A real PostgreSQL server that is restarted, stays away or refuses: waited for, then one error without secrets."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import postgres
import pytest
import search_sim as sim

from bole_codegen.search import claims, patience
from bole_codegen.search.journal import StorageError, open_storage
from bole_codegen.search.progress import Progress
from bole_codegen.search.simulate import Surface

_WHY = postgres.missing()
#: CI sets it: a server that is missing there is a failure, no test left out in silence.
_REQUIRED = bool(os.environ.get("BOLE_REQUIRE_POSTGRESQL"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(_WHY is not None and not _REQUIRED, reason=_WHY or "")]

OPTIONS: dict[str, Any] = {"trials": 12, "rounds": 3, "workers": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Server]:
    if _WHY is not None:
        pytest.fail(f"{_WHY}, and BOLE_REQUIRE_POSTGRESQL is set")
    with postgres.server() as found:
        yield found


class _Notes(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def _search(url: str, seed: int, after: int, act: Any) -> tuple[sim.Simulation, list[str]]:
    """Search, and act when so many candidates were timed; return the search and what it said."""
    search = sim.Simulation(url, Surface(seed=seed), factor=0.01, **OPTIONS)
    notes = _Notes()
    search.driver._progress = notes
    quick, count = search.evaluator.quick, iter(range(1000))

    async def counted(target: Any, config: Any, device: int) -> Any:
        if next(count) == after:
            act()
        return await quick(target, config, device)

    search.evaluator.quick = counted  # type: ignore[method-assign]
    return search, notes.lines


def test_a_server_that_is_restarted_is_waited_for(server: postgres.Server, tmp_path: Path) -> None:
    chosen = sim.targets(batches=[1, 64], nodes=[16, 32])
    undisturbed = sim.Simulation(tmp_path / "j", Surface(seed=1), **OPTIONS)
    undisturbed.run(chosen)

    def restart() -> None:
        server.stop()
        threading.Timer(1.5, server.start).start()

    search, said = _search(server.url, 1, 8, restart)
    search.run(chosen)
    assert search.table() == undisturbed.table()
    waited = [line for line in said if "waiting for it" in line]
    assert waited
    assert all(line.startswith("the postgresql storage does not answer (OperationalError: ") for line in waited)
    # Everything is there: nothing is evaluated again.
    again = sim.Simulation(server.url, Surface(seed=1), **OPTIONS)
    assert all(b.reused for b in again.run(chosen).buckets)
    assert again.evaluator.evaluations == 0


def test_a_server_that_stays_away_ends_the_search(
    server: postgres.Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(patience, "PATIENCE", 1.0)
    chosen = sim.targets(batches=[1, 64], nodes=[16, 32, 64], families=["mamba2"])
    search, _ = _search(server.url, 2, 30, server.stop)
    begun = time.monotonic()
    try:
        with pytest.raises(
            StorageError,
            match=r"^the postgresql storage has not answered for \d+ s \(OperationalError: .*[Cc]onnection .*\)\. What "
            "was finished before is kept in it: once it answers, the same command goes on from there$",
        ):
            search.run(chosen)
    finally:
        server.start()
    assert time.monotonic() - begun < 30
    # What was finished is in the table, and the rest goes on.
    assert search.saved == search.driver.result.entries
    monkeypatch.setattr(
        claims, "_host", lambda: "another"
    )  # The process that could not give its claims up is this one.
    monkeypatch.setattr(claims, "LEASE", 0.0)
    again = sim.Simulation(server.url, Surface(seed=2), **OPTIONS)
    result = again.run(chosen)
    assert result.resumed > 10
    assert len(again.saved) == len(chosen)
    undisturbed = sim.Simulation(tmp_path / "j", Surface(seed=2), **OPTIONS)
    undisturbed.run(chosen)
    assert again.table() == undisturbed.table()


def test_errors_say_what_the_driver_says_and_no_password(server: postgres.Server) -> None:
    url = server.url
    with pytest.raises(StorageError, match=r'cannot open the postgresql storage: .*database "nosuch" does not exist'):
        open_storage(url.replace("/postgres", "/nosuch"))
    with pytest.raises(StorageError, match=r"cannot open the postgresql storage: .*[Cc]onnection refused"):
        open_storage("postgresql://bole:se%20cret@127.0.0.1:1/postgres")
    server.demand_password("right one")
    try:
        for wrong in ("se%20cret", "pass%2Fword"):
            with pytest.raises(StorageError, match="password authentication failed for user") as caught:
                open_storage(url.replace("bole@", f"bole:{wrong}@"))
            assert "cret" not in str(caught.value)
            assert "word " not in str(caught.value).replace("password ", "")
        open_storage(url.replace("bole@", "bole:right%20one@"))
    finally:
        server.trust()
