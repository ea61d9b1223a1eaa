"""Journals that are damaged, deleted or full while a search works with them."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import search_fakes as fakes
from optuna.storages import BaseStorage
from optuna.study import StudyDirection

from bole_codegen.search import journal
from bole_codegen.search.journal import StorageError, open_storage

NEW = [StudyDirection.MINIMIZE]

#: Writes half a line and is gone, as with a kill.
_HALF = """
import os, sys; sys.path[:] = eval(sys.argv[1])
from bole_codegen.search import journal
from optuna.study import StudyDirection
storage = journal.open_storage(sys.argv[2])
locked = journal._locked
class Half:
    def __init__(self, file): self.file = file
    def __getattr__(self, name): return getattr(self.file, name)
    def write(self, data):
        self.file.write(data[: len(data) // 2]); self.file.flush()
        os._exit(9)
@journal.contextlib.contextmanager
def half(path, write):
    with locked(path, write) as file:
        yield Half(file) if write else file
journal._locked = half
storage.create_new_study([StudyDirection.MINIMIZE], "killed")
"""


def _names(storage: BaseStorage) -> list[str]:
    return [s.study_name for s in storage.get_all_studies()]


def test_half_a_line_of_a_killed_run_is_cut_by_the_next_that_writes(tmp_path: Path) -> None:
    path = tmp_path / "j"
    alive, reader = open_storage(str(path)), open_storage(str(path))
    alive.create_new_study(NEW, "before")
    child = subprocess.run([sys.executable, "-c", _HALF, repr(sys.path), str(path)], check=False)
    assert child.returncode == 9
    assert not path.read_bytes().endswith(b"\n")
    # Nobody reads a line that has no end.
    assert _names(reader) == _names(alive) == ["before"]
    alive.create_new_study(NEW, "after")
    assert _names(reader) == _names(alive) == _names(open_storage(str(path))) == ["before", "after"]
    assert all(json.loads(line) for line in path.read_bytes().splitlines())


def test_a_reader_waits_for_the_line_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "j"
    storage = open_storage(str(path))
    storage.create_new_study(NEW, "one")
    found: list[list[str]] = []
    with journal._locked(path, write=True) as file:
        reader = threading.Thread(target=lambda: found.append(_names(open_storage(str(path)))))
        reader.start()
        reader.join(0.1)
        assert reader.is_alive()
        line = path.read_bytes().splitlines()[0].replace(b'"one"', b'"two"')
        file.seek(0, os.SEEK_END)
        file.write(line + b"\n")
    reader.join(10)
    assert found == [["one", "two"]]


def _replace(path: Path) -> None:
    other = open_storage(str(path.with_name("other")))
    for i in range(300):
        other.create_new_study(NEW, f"x{i}")
    os.replace(path.with_name("other"), path)


def _fill(path: Path) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    journal.os.fsync = full  # type: ignore[attr-defined]


def _foreign(line: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with open(path, "a") as file:
            file.write(line)

    return write


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (Path.unlink, "was deleted while it was in use.*Tables hold what was finished"),
        (_replace, "was replaced while it was in use.*Tables hold what was finished"),
        (lambda path: os.truncate(path, 0), "was cut or overwritten while it was in use"),
        (lambda path: os.truncate(path, 700), "was cut or overwritten while it was in use"),
        (_fill, r"cannot write the journal .*No space left on device; what was finished before is kept in it, and the"),
        (_foreign("hello\n"), "is no journal of bole-tune: its last line is no record of one"),
        (_foreign('{"op_code":77,"worker_id":"x"}\n'), "the journal cannot be used .*the same command goes on from"),
    ],
    ids=["deleted", "replaced", "emptied", "cut", "disk full", "lines of others", "records of others"],
)
def test_what_happens_to_a_journal_in_use_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], object], said: str
) -> None:
    monkeypatch.setattr(journal.os, "fsync", os.fsync)  # Put back at the end.
    driver, saved = fakes.make(tmp_path, trials=6)
    driver._abreast = 1
    quick = fakes.FakeBench.quick
    met: list[int] = []

    def meet(self: Any, target: Any, config: Any) -> Any:
        if target.problem.nodes == 32 and saved and not met:
            met.append(len(saved))
            act(tmp_path / "journal")
        return quick(self, target, config)

    monkeypatch.setattr(fakes.FakeBench, "quick", meet)
    with pytest.raises(StorageError, match=said):
        _one_by_one(driver, fakes.targets(nodes=(16, 32)))
    assert met == [3]
    assert {e.nodes for e in saved} == {16}  # In the table.
    assert driver.result.entries == saved


def _one_by_one(driver: Any, targets: Any) -> None:
    """Search classes one after the other."""
    everything = driver._everything

    async def in_turn(todo: list[Any]) -> None:
        todo[1].earlier = frozenset({todo[0].problem})
        await everything(todo)

    driver._everything = in_turn
    driver.run(targets)


def test_a_full_disk_loses_nothing_that_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync
    count = iter(range(10_000))

    def full(handle: int) -> None:
        if next(count) > 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(journal.os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        fakes.run(tmp_path, fakes.targets(), trials=20)
    done = len(fakes.calls(tmp_path, "quick"))
    monkeypatch.setattr(journal.os, "fsync", fsync)
    result, saved = fakes.run(tmp_path, fakes.targets(), trials=20)
    assert done >= 10
    assert result.resumed >= done - 1
    assert len(saved) == 3
