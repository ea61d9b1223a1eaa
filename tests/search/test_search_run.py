"""The whole search with fakes: what it finds, what it survives, what it remembers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import search_fakes as fakes
import table_fakes
from optuna.study import StudyDirection

from bole_codegen.search import deadline
from bole_codegen.search import driver as driver_module
from bole_codegen.search.finish import Hints
from bole_codegen.search.journal import StorageError, open_storage, repair

ALL = 13  # Distinct kernels of the fake space: BV x STAGES within shared memory; MODE changes nothing.


def chosen(saved: list[Any]) -> dict[int, tuple[int, int]]:
    return {e.work: (e.params["BV"], e.params["STAGES"]) for e in saved}


def test_a_small_space_is_tried_in_full_and_duplicates_once(tmp_path: Path) -> None:
    result, saved = fakes.run(tmp_path, fakes.targets(), trials=100)
    assert chosen(saved) == {32: (64, 2), 256: (64, 2), 2048: (128, 2)}
    assert result.tried == len(fakes.calls(tmp_path, "screen")) == ALL
    assert result.duplicates == ALL
    entry = saved[0]
    assert (entry.default_us, entry.median_us, entry.floor_us) == (8.82, 5.32, 1.0)
    assert (entry.error, entry.label, entry.trials) == (1e-6, "measured", ALL)
    assert entry.runner_up.params["BV"] in (32, 64, 128)
    assert entry.margin > 0.2


def test_a_large_space_is_sampled(tmp_path: Path) -> None:
    result, saved = fakes.run(tmp_path, fakes.targets((1, 64)), trials=9, rounds=3)
    assert result.tried <= 9
    assert all(e.median_us <= e.default_us for e in saved)


def test_neighbours_time_the_best_of_the_searched(tmp_path: Path) -> None:
    _, saved = fakes.run(tmp_path, fakes.targets((1, 2, 4, 8, 16, 32, 64)), trials=100, anchors=2, top=3)
    assert chosen(saved) == {w: (64 if w <= 256 else 128, 2) for w in (32, 64, 128, 256, 512, 1024, 2048)}
    transferred = {e.work: e.transferred_from for e in saved}
    assert transferred[32] is None
    assert transferred[2048] is None
    assert transferred[64].endswith("w32")
    assert transferred[1024].endswith("w2048")
    # Two searched buckets time everything, five neighbours a few.
    assert len(fakes.calls(tmp_path, "quick")) <= 2 * ALL + 5 * 6


@pytest.mark.parametrize("how", ["raise", "wrong", "nan", "bounds", "races", "resources"])
def test_a_failing_best_candidate_leaves_the_second_best(tmp_path: Path, how: str) -> None:
    result, saved = fakes.run(tmp_path, fakes.targets((1,)), trials=100, plant={"screen 64": how})
    assert chosen(saved)[32][0] in (32, 128)
    assert result.failures == {{"raise": "error"}.get(how, how): 3}


def test_never_worse_than_the_default(tmp_path: Path) -> None:
    fast_default = {f"screen {bv}": "wrong" for bv in (16, 64, 128, 256)}
    _, saved = fakes.run(tmp_path, fakes.targets((1,)), trials=3, plant=fast_default)
    assert saved[0].median_us <= saved[0].default_us


def test_an_incumbent_is_compared_with_and_kept_on_a_tie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = table_fakes.FUSED.config({"BV": 128, "STAGES": 3, "MODE": "rhs"})
    monkeypatch.setattr(fakes, "true_us", lambda target, config: 5.0)
    _, saved = fakes.run(tmp_path, fakes.targets((1,)), trials=6, incumbents=lambda target: Hints(held))
    assert (saved[0].params["BV"], saved[0].params["STAGES"]) == (128, 3)


def test_nothing_works(tmp_path: Path) -> None:
    plant = {f"screen {bv}": "wrong" for bv in (16, 32, 64, 128, 256)}
    result, saved = fakes.run(tmp_path, fakes.targets((1,)), trials=5, plant=plant)
    assert saved == []
    assert "no candidate works; the first reason: planted" in result.buckets[0].reason


def test_the_same_run_again_does_nothing_and_fresh_starts_over(tmp_path: Path) -> None:
    _, first = fakes.run(tmp_path, fakes.targets(), trials=8)
    before = len(fakes.calls(tmp_path))
    result, second = fakes.run(tmp_path, fakes.targets(), trials=8)
    assert len(fakes.calls(tmp_path)) == before
    assert second == first
    assert all(b.reused for b in result.buckets)
    result, _ = fakes.run(tmp_path, fakes.targets(), trials=12)  # More trials: goes on from those it has.
    assert result.resumed > 0
    assert len(fakes.calls(tmp_path, "screen")) <= 12
    fakes.run(tmp_path, fakes.targets(), trials=8, fresh=True)
    assert len(fakes.calls(tmp_path, "screen")) >= 16


def test_another_launch_of_a_bucket_is_another_search(tmp_path: Path) -> None:
    """Times of chains say nothing of ragged trees, nor those of other heads with as much work."""
    (target, *_) = fakes.targets()
    fakes.run(tmp_path, (target,), trials=8)
    before = len(fakes.calls(tmp_path))
    for other in (replace(target, shape="chain"), replace(target, hk=1, hv=target.hv // target.hk)):
        fakes.run(tmp_path, (other,), trials=8)
        assert len(fakes.calls(tmp_path)) > before
        before = len(fakes.calls(tmp_path))
    fakes.run(tmp_path, (target,), trials=8)
    assert len(fakes.calls(tmp_path)) == before


def test_changed_kernels_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.run(tmp_path, fakes.targets((1,)), trials=8)
    before = len(fakes.calls(tmp_path, "screen"))
    old = fakes.render

    def changed(problem: Any, config: Any) -> Any:
        (kernel,) = old(problem, config)
        return (fakes.FakeKernel("x", "f" + kernel.text_hash[1:], kernel.plan),)

    monkeypatch.setattr(fakes, "render", changed)
    result, _ = fakes.run(tmp_path, fakes.targets((1,)), trials=8)
    assert result.resumed == 0
    assert len(fakes.calls(tmp_path, "screen")) == 2 * before


def test_an_interrupt_keeps_what_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick, count = fakes.FakeBench.quick, iter(range(1000))

    def interrupted(self: Any, target: Any, config: Any) -> Any:
        if next(count) == 5:
            raise KeyboardInterrupt
        return quick(self, target, config)

    monkeypatch.setattr(fakes.FakeBench, "quick", interrupted)
    driver, saved = fakes.make(tmp_path, trials=100)
    with pytest.raises(KeyboardInterrupt):
        driver.run(fakes.targets())
    assert saved == []
    monkeypatch.setattr(fakes.FakeBench, "quick", quick)
    result, saved = fakes.run(tmp_path, fakes.targets(), trials=100)
    assert result.resumed == 5
    assert chosen(saved) == {32: (64, 2), 256: (64, 2), 2048: (128, 2)}


def test_a_killed_run_resumed_gives_the_undisturbed_table(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:] = eval(sys.argv[1]); from pathlib import Path; import search_fakes as f\n"
        "f.run(Path(sys.argv[2]), f.targets(), trials=100, rounds=5, delay=0.05)\n"
    )
    killed = tmp_path / "killed"
    killed.mkdir()
    child = subprocess.Popen([sys.executable, "-c", code, repr(sys.path), str(killed)])
    limit = time.monotonic() + 60
    while len(fakes.calls(killed, "quick")) < 8 and time.monotonic() < limit:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    done = len(fakes.calls(killed, "quick"))
    assert 8 <= done < 3 * ALL
    with open(killed / "journal", "ab") as file:
        file.write(b'{"op_code": 4, "wor')  # What a kill in the middle of a write leaves.
    result, saved = fakes.run(killed, fakes.targets(), trials=100, rounds=5)
    assert result.resumed >= done - 1
    _, undisturbed = fakes.run(tmp_path, fakes.targets(), trials=100, rounds=5)
    assert chosen(saved) == chosen(undisturbed)
    repeated = [c for c in fakes.calls(killed, "quick") if fakes.calls(killed, "quick").count(c) > 3 + 1]
    assert repeated == []


def test_a_time_budget_is_kept_and_leaves_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "WRITE_UP", 0.2)
    monkeypatch.setitem(deadline.CONFIRM_GUESS, "measured", 0.0)
    monkeypatch.setitem(deadline.FINISH_GUESS, "measured", 0.05)

    async def slow(self: Any, problem: Any, config: Any, keep: bool = False) -> Any:
        await asyncio.sleep(0.15)
        return await screen(self, problem, config, keep)

    screen = fakes.LocalEvaluator.screen
    monkeypatch.setattr(fakes.LocalEvaluator, "screen", slow)
    driver, saved = fakes.make(tmp_path, trials=8, rounds=8, time_budget=1.0)
    begun = time.monotonic()
    result = driver.run(fakes.targets())
    assert time.monotonic() - begun < 1.3
    assert result.out_of_time
    assert len(saved) == 3
    assert 1 <= result.tried < 8
    again, _ = fakes.run(tmp_path, fakes.targets(), trials=8)
    assert again.resumed >= result.tried


def test_a_budget_of_nothing_names_the_buckets_that_are_left(tmp_path: Path) -> None:
    result, saved = fakes.run(tmp_path, fakes.targets(), trials=100, time_budget=0.001)
    assert saved == []
    assert [b.reason for b in result.buckets] == [driver_module.OUT_OF_TIME] * 3


def test_two_runs_with_one_seed_agree(tmp_path: Path) -> None:
    tables = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        _, saved = fakes.run(tmp_path / name, fakes.targets(), trials=9, rounds=3)
        tables.append((chosen(saved), fakes.calls(tmp_path / name, "screen")))
    assert tables[0] == tables[1]


def test_a_class_learns_from_the_one_before(tmp_path: Path) -> None:
    driver, _ = fakes.make(tmp_path, trials=100)
    driver._evaluator.workers = 1
    seen: dict[int, Any] = {}
    first = driver._winners.first

    def spy(target: Any, *rest: Any) -> Any:
        seen[target.problem.nodes] = found = first(target, *rest)
        return found

    driver._winners.first = spy
    driver.run(fakes.targets((1, 8, 64), (16, 32, 64)))
    assert seen[16] == seen[32] == []  # Side by side: what one finds first must not decide what the other tries.
    assert [c["BV"] for c in seen[64]] == [128, 64]


@pytest.mark.parametrize("text", ["not json\nnot json\n", "[]\n", '{"op_code": 0}\n{"x": 1}\n'])
def test_a_journal_that_is_none_says_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / "j").write_text(text)
    with pytest.raises(StorageError, match="give another file to --storage"):
        open_storage(str(tmp_path / "j"))


def test_a_database_that_cannot_be_opened_hides_its_password() -> None:
    with pytest.raises(StorageError, match="cannot open the nosuch storage") as caught:
        open_storage("nosuch://me:secret@host/db")
    assert "secret" not in str(caught.value)


RECORD = b'{"op_code":4,"worker_id":"w"}\n'


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (b"", b""),
        (2 * RECORD, 2 * RECORD),
        (RECORD[:-1], b""),
        (RECORD[:14], b""),
        *[(9 * RECORD + RECORD[:n], 9 * RECORD) for n in range(1, len(RECORD))],
        (RECORD + b'{"op_code":4,"x":"' + 9000 * b"a", RECORD),
        (
            RECORD + b'{"op_code":4,"x":"' + 9000 * b"a" + b'"}\n',
            RECORD + b'{"op_code":4,"x":"' + 9000 * b"a" + b'"}\n',
        ),
    ],
)
def test_repair_cuts_an_unfinished_last_line(tmp_path: Path, data: bytes, kept: bytes) -> None:
    path = tmp_path / "j"
    path.write_bytes(data)
    assert repair(path) == len(data) - len(kept)
    assert path.read_bytes() == kept
    assert os.listdir(tmp_path) != []


@pytest.mark.parametrize(
    "data",
    [
        b"my only notes, no newline at end",
        b'{"a": 1}\n{"b": 2}',
        b"hello\n",
        b"[]\n",
        b"{",
        b"\n",
        b"\xff\x00\n",
        b'{"op_code": "x"}\n',
        RECORD + b"hello\n",
        RECORD + b"hello",
        RECORD + b"\xff" * 5000,
        RECORD + b'{"b": 2}\n',
    ],
)
def test_a_file_that_is_no_journal_keeps_its_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"notes is no journal.*Nothing was written.*give another file to --storage"):
        open_storage(str(path))
    assert path.read_bytes() == data


def test_a_folder_and_a_device_are_no_journals(tmp_path: Path) -> None:
    for where in (tmp_path, Path("/dev/null")):
        with pytest.raises(StorageError, match="it is no regular file"):
            open_storage(str(where))


@pytest.mark.parametrize("line", ["hello\n", "hello\nhello\n", "[]\n", '{"x": 1}\n'])
def test_lines_of_others_in_a_journal_in_use_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "j"
    storage = open_storage(str(path))
    other = open_storage(str(path))
    storage.create_new_study([StudyDirection.MINIMIZE], "one")
    with open(path, "a") as file:
        file.write(line)
    with open(path, "ab") as file:
        file.write(RECORD)
    with pytest.raises(StorageError, match=r"cannot read the journal .*j: .*--storage"):
        other.get_all_studies()
