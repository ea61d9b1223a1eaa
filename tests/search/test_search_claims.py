"""Which of several runs has a class: by signs of life as this run sees them, and never two of them in the end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import search_fakes as fakes
from optuna.storages import BaseStorage, RDBStorage
from sqlalchemy.exc import OperationalError

from bole_codegen.search import claims, driver, patience
from bole_codegen.search.claims import Claims
from bole_codegen.search.journal import StorageError, open_storage
from bole_codegen.search.patience import Patience


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Claims]:
    """Return claims of a run on some host."""

    def claims_of(host: str, storage: BaseStorage | None = None) -> Claims:
        monkeypatch.setattr(claims, "_host", lambda: host)
        return Claims(storage or open_storage(str(tmp_path / "j")))

    return claims_of


@pytest.mark.parametrize("seconds", [-1000.0, 1000.0])
def test_a_clock_that_is_off_takes_nothing_from_a_live_run(
    make: Callable[..., Claims], monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    there, here = make("there 1"), make("here 1")
    assert there.take("a")
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + seconds)
    assert not here.take("a")
    monkeypatch.setattr(claims, "LEASE", 0.02)
    time.sleep(0.03)
    assert here.take("a")


def test_silence_while_the_storage_was_away_is_nobodys(
    make: Callable[..., Claims], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "LEASE", 0.05)
    there, here = make("there 1"), make("here 1")
    assert there.take("a")
    assert not here.take("a")
    time.sleep(0.1)
    here._ask.answered = time.monotonic()  # As after an outage.
    assert not here.take("a")


def test_another_container_of_the_machine_has_process_ids_of_its_own(make: Callable[..., Claims]) -> None:
    assert claims._host().endswith(os.readlink("/proc/self/ns/pid"))
    there, here = make("name boot pid:[1]"), make("name boot pid:[2]")
    there._me.update(pid=1 << 30)
    assert there.take("a")
    assert not here.take("a")


def test_a_process_id_that_another_process_has_now_is_of_no_run(make: Callable[..., Claims]) -> None:
    dead, here = make("here 1"), make("here 1")
    dead._me.update(started="1")  # The pid is there, and was started at another time.
    assert dead.take("a")
    assert here.take("a")


@pytest.mark.parametrize(
    "owner",
    [None, "x", [], {}, {"host": ""}, {"host": 5, "beat": float("nan")}, {"host": "here 1", "pid": "x"},
     {"host": "here 1", "pid": -1, "started": ""}, {"beat": "soon"}],
)  # fmt: skip
def test_a_claim_that_says_nonsense_is_free_in_the_end(
    make: Callable[..., Claims], monkeypatch: pytest.MonkeyPatch, owner: Any
) -> None:
    other, here = make("there 1"), make("here 1")
    assert other.take("a")
    other._write(other._held["a"][0], owner)
    monkeypatch.setattr(claims, "LEASE", 0.02)
    monkeypatch.setattr(claims, "BEAT", 0.02)
    here.others(lambda name: True)
    here.take("a")
    time.sleep(0.03)
    assert here.take("a")


@pytest.mark.parametrize("slow", [0, 1])
def test_of_two_that_claim_at_once_one_at_most_has_it(
    make: Callable[..., Claims], monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    """One is stopped between creating a claim and signing it, for so long that the other thinks it dead."""
    monkeypatch.setattr(claims, "BEAT", 0.0)
    runs = [make("one 1"), make("two 1")]
    sign, found = runs[slow]._sign, {}

    def stopped(study: int) -> None:
        if not found:
            found[1 - slow] = runs[1 - slow].take("a")
        sign(study)

    runs[slow]._sign = stopped  # type: ignore[method-assign]
    found[slow] = runs[slow].take("a")
    assert found == {slow: False, 1 - slow: True}
    assert runs[1 - slow].holds("a")


def test_a_run_that_was_stopped_takes_the_results_of_the_one_that_took_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, first = fakes.FakeBench.quick, iter([True])
    successor: list[Any] = []

    def stopped(self: Any, target: Any, config: Any) -> Any:
        if next(first, False):
            monkeypatch.setattr(claims, "_host", lambda: "another")
            monkeypatch.setattr(claims, "LEASE", 0.0)
            run = threading.Thread(target=lambda: successor.append(fakes.run(tmp_path, fakes.targets(), trials=8)))
            run.start()
            run.join()
        return quick(self, target, config)

    monkeypatch.setattr(fakes.FakeBench, "quick", stopped)
    result, saved = fakes.run(tmp_path, fakes.targets(), trials=8)
    ((_, theirs),) = successor
    assert [(b.target, b.entry) for b in result.buckets] == [(b.target, b.entry) for b in successor[0][0].buckets]
    assert saved == theirs
    assert all(b.reused for b in result.buckets)
    assert len(result.searches) == 1


def _away(times: int) -> tuple[list[int], Callable[[], str]]:
    """Return how often a storage was asked, and a question that fails so many times."""
    asked: list[int] = []

    def ask() -> str:
        asked.append(1)
        if len(asked) <= times:
            raise OperationalError("SELECT secret", {}, Exception("server closed the connection of secret"))
        return "answer"

    return asked, ask


def test_a_database_that_is_away_for_a_moment_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "WAITS", (0.001,))
    ask, said = Patience(RDBStorage(f"sqlite:///{tmp_path / 'db'}")), []
    ask.note = said.append
    asked, question = _away(5)
    assert ask(question) == "answer"
    assert len(asked) == 6
    assert said == [
        "the sqlite storage does not answer (OperationalError: server closed the connection of secret): waiting for it"
    ]


def test_a_database_that_stays_away_is_given_up_once_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "WAITS", (0.01,))
    monkeypatch.setattr(patience, "PATIENCE", 0.05)
    ask = Patience(RDBStorage(f"sqlite:///{tmp_path / 'db'}"))
    asked, question = _away(10_000)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"has not answered for .*: once it answers, the same command goes on"):
            ask(question)
    tries = len(asked)
    with pytest.raises(StorageError):
        ask(question)
    assert len(asked) == tries


def test_an_interrupt_waits_no_more(tmp_path: Path) -> None:
    ask = Patience(RDBStorage(f"sqlite:///{tmp_path / 'db'}"))
    begun = time.monotonic()
    threading.Timer(0.05, ask.stop).start()
    with pytest.raises(StorageError):
        ask(_away(10_000)[1])
    assert time.monotonic() - begun < 5


def test_a_run_that_can_give_no_sign_of_life_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "BEAT", 0.01)
    whole, _ = fakes.make(tmp_path / "whole", trials=100)
    whole.run(fakes.targets())
    made, _ = fakes.make(tmp_path, trials=100, delay=0.05)

    def beat() -> None:
        raise StorageError("away")

    made.environment.store.claims.beat = beat
    with pytest.raises(StorageError, match="away"):
        made.run(fakes.targets())
    assert len(fakes.calls(tmp_path)) < len(fakes.calls(tmp_path / "whole"))
