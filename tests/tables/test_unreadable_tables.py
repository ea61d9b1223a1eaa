"""What has the name of a table, or of a list, and cannot be read as one: it is named once, and the rest serves."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import table_fakes as fakes

from bole_codegen import cli
from bole_codegen.tables.known_bad import KnownBad
from bole_runtime.tables.bad import bad_path, load_bad
from bole_runtime.tables.checks import CheckStore
from bole_runtime.tables.load import TableError, load_file, load_table
from bole_runtime.tables.lookup import Dispatcher, TableWarning

P = fakes.PROBLEM


def _folder(path: Path) -> None:
    path.mkdir()


def _nothing(path: Path) -> None:
    path.symlink_to("nowhere.json")


def _itself(path: Path) -> None:
    path.symlink_to(path.name)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


KINDS: list[tuple[Callable[[Path], None], str]] = [
    (_folder, "is a folder"),
    (os.mkfifo, "is no file"),
    (_socket, "is no file"),
    (_nothing, "(No such file or directory|is a link to nothing)"),
    (_itself, "Too many levels of symbolic links"),
]
every_kind = pytest.mark.parametrize(("make", "words"), KINDS, ids=[make.__name__ for make, _ in KINDS])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose paths are short, as those of sockets must be."""
    monkeypatch.chdir(tmp_path)
    return Path()


def _dispatcher(root: Path, shipped: Path) -> Dispatcher:
    return Dispatcher(
        (root, shipped), user_roots=1, variants=fakes.variants, gpus=fakes.gpus, default=fakes._default,
        triton="3.6.1", checks=CheckStore(root / "cache"),
    )  # fmt: skip


def _warnings(dispatcher: Dispatcher) -> list[str]:
    """Ask for two buckets, and return the warnings of both."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for problem in (P, P.replace(work=64)):
            assert dispatcher.resolve(problem, "NVIDIA H200", fakes.LIMITS).config["BV"] == 64
        dispatcher.clear()
        dispatcher.resolve(P, "NVIDIA H200", fakes.LIMITS)
    return [str(w.message) for w in caught if issubclass(w.category, TableWarning)]


@every_kind
def test_a_table_is_named_once_and_the_next_one_serves(here: Path, make: Any, words: str) -> None:
    fakes.write(here / "shipped", fakes.entry(P), fakes.entry(P.replace(work=64)))
    (here / "own" / "h200").mkdir(parents=True)
    path = here / "own" / "h200" / "gdn.json"
    make(path)
    (said,) = _warnings(_dispatcher(here / "own", here / "shipped"))
    assert said.startswith(f"bole: table {path}: ")
    assert said.endswith("; it is not used")
    for read in (load_file, lambda p: load_table(p, fakes.variants)):
        with pytest.raises(TableError, match=words):
            read(path)


@every_kind
def test_a_list_is_named_once_and_not_used(here: Path, make: Any, words: str) -> None:
    fakes.write(here / "shipped", fakes.entry(P), fakes.entry(P.replace(work=64)))
    path = bad_path(here / "own", "h200", "3.6.1")
    path.parent.mkdir(parents=True)
    make(path)
    (said,) = _warnings(_dispatcher(here / "own", here / "shipped"))
    assert said.startswith(f"bole: known-bad list {path} ")
    assert said.endswith("; it is not used")
    with pytest.raises(ValueError, match=words):
        load_bad(path)
    with pytest.raises(ValueError, match="known-bad list"):
        KnownBad([here / "own"], "h200", "3.6.1")


@pytest.mark.parametrize("table", ["kda", "x"])
def test_names_that_are_no_tables_are_nobodys_business(here: Path, table: str) -> None:
    fakes.write(here / "shipped", fakes.entry(P), fakes.entry(P.replace(work=64)))
    (here / "own" / "h200" / f"{table}.json").mkdir(parents=True)
    (here / "own" / "h100").write_text("a file in the place of a GPU's folder")
    assert _warnings(_dispatcher(here / "own", here / "shipped")) == []


def test_tools_say_what_is_wrong(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "out" / "h200" / "gdn.json").mkdir(parents=True)
    for action, status in (("--show", 1), ("--stale", 1)):
        assert cli.main(["--gpu", "h200", action, "--out", "out"]) == status
        captured = capsys.readouterr()
        assert "table out/h200/gdn.json: is a folder; a table is a file" in captured.out + captured.err


def test_a_search_beside_an_unreadable_table_ends_before_it_begins(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.OfflineEvaluator, "start", lambda self: pytest.fail("workers started"))
    monkeypatch.setenv("BOLE_CACHE_DIR", str(here.absolute() / "cache"))
    (here / "out" / "h100" / "kda.json").mkdir(parents=True)
    command = "--gpu h100 --offline --hk 1 --hv 2 --dk 32 --dv 32 --nodes 16 --batch 1 --ops commit --precision fast"
    assert cli.main([*command.split(), "--out", "out"]) == 1
    assert "bole-tune: table out/h100/kda.json: is a folder; a table is a file" in capsys.readouterr().err


GOOD = b'{"schema_version": 1, "family": "gdn", "entries": []'


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xfe{}", b"{", GOOD, GOOD + b', "protocol": "\xff"}', b"[]", b"null", b"[" * 100_000, b"\0" * 99],
)
def test_bytes_that_are_no_table_are_an_error_that_names_the_file(
    data: bytes, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = here / "out" / "h200" / "gdn.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    assert cli.main(["--diff", "out", "out"]) == 2
    assert f"bole-tune: table {path}: " in capsys.readouterr().err
    for action in ("--show", "--stale"):
        assert cli.main(["--gpu", "h200", action, "--only-out", "--out", "out"]) == 1
        captured = capsys.readouterr()
        assert f"table {path}: " in captured.out + captured.err


def test_a_table_that_is_too_large_is_not_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = here / "out" / "h200" / "gdn.json"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(17 << 20)
    assert cli.main(["--gpu", "h200", "--show", "--only-out", "--out", "out"]) == 1
    assert "17825792 bytes is more than the 16777216 that a table may have" in capsys.readouterr().err
