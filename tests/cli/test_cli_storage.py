"""What ``bole-tune`` says when its storage is lost, and what it never shows of one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import search_fakes as fakes

from bole_codegen import cli
from bole_codegen.search.journal import StorageError

WORDS = "--gpu h100 --offline --hk 1 --hv 2 --dk 32 --dv 32 --nodes 16 --batch 1 --ops commit --precision fast"


def test_a_storage_that_is_lost_ends_in_what_was_found_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result, _ = fakes.run(tmp_path, fakes.targets(), trials=4)

    def lost(self: Any) -> Any:
        self.driver = SimpleNamespace(result=result)
        raise StorageError("the postgresql storage has not answered")

    monkeypatch.setenv("BOLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cli.Session, "run", lost)
    assert cli.main([*WORDS.split(), "--no-report", "--out", str(tmp_path / "out")]) == 1
    out, err = capsys.readouterr()
    assert out.count("verify gdn 128x128") == 3
    assert err.splitlines()[-1] == "bole-tune: the postgresql storage has not answered"
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("postgresql://me:se%20cret@host/db", "postgresql://me:***@host/db"),
        ("--storage=postgresql://me:secret@host/db?a=b", "--storage=postgresql://me:***@host/db?a=b"),
        ("postgresql://host/db?user=me&password=secret", "postgresql://host/db?password=***&user=me"),
        ("postgresql://me@host:5432/db", "postgresql://me@host:5432/db"),
        ("postgresql://me:secret@host:no port/db", "postgresql://***"),
        ("sqlite:///some/file.db", "sqlite:///some/file.db"),
        ("--storage=journal", "--storage=journal"),
        ("--json", "--json"),
    ],
)
def test_a_command_that_is_shown_has_no_password(argument: str, shown: str) -> None:
    assert cli._shown(argument) == shown
