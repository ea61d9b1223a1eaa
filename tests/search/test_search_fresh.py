"""``--fresh`` beside another run on the same storage: it is refused, and what is deleted all the same is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import search_fakes as fakes

from bole_codegen import cli
from bole_codegen.search import claims as claims_module
from bole_codegen.search.claims import Claims
from bole_codegen.search.journal import StorageError, open_storage
from bole_codegen.search.kinds import SEARCHED_OPS


def _claim(folder: Path, nodes: int = 16, **changes: str) -> Claims:
    """Claim a class as another run does."""
    names = {"gpu": "h200", "space": "0", **changes}
    claims = Claims(open_storage(str(folder / "journal")))
    (target,) = fakes.targets((1,), (nodes,))
    assert claims.take(f"{names['gpu']}/{target.kernels.key()}@{names['space']}")
    return claims


@pytest.mark.parametrize(
    "nodes", [16, 32]
)  # A class of this run, and another one of that run, which has read them all.
def test_fresh_is_refused_while_another_run_works(tmp_path: Path, nodes: int) -> None:
    fakes.run(tmp_path, fakes.targets(), trials=8)
    other = _claim(tmp_path, nodes)
    with pytest.raises(StorageError, match=r"--fresh forgets .* another run \(process \d+ of this machine\)"):
        fakes.run(tmp_path, fakes.targets(), trials=8, fresh=True)
    result, _ = fakes.run(tmp_path, fakes.targets(), trials=8)
    assert all(b.reused for b in result.buckets)  # Nothing was forgotten.
    other.release_all()
    result, _ = fakes.run(tmp_path, fakes.targets(), trials=8, fresh=True)
    assert not any(b.reused for b in result.buckets)
    assert result.resumed == 0


def test_runs_that_share_no_class_do_not_matter(tmp_path: Path) -> None:
    _claim(tmp_path, gpu="h100")
    _claim(tmp_path, space="1")
    assert len(fakes.run(tmp_path, fakes.targets(), trials=8, fresh=True)[1]) == 3


def test_a_run_that_was_killed_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = _claim(tmp_path, 32)  # No class of these runs, which would take it over.
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    other._me.update(pid=child.pid, started="1")
    other.beat()
    assert len(fakes.run(tmp_path, fakes.targets(), trials=8, fresh=True)[1]) == 3
    # Of another host until it goes silent, and then one that died before it signed.
    other._me["host"] = "there 1234"
    other.beat()
    with pytest.raises(StorageError, match=r"process .* of there"):
        fakes.run(tmp_path, fakes.targets(), trials=8, fresh=True)
    monkeypatch.setattr(claims_module, "LEASE", 0.0)
    assert len(fakes.run(tmp_path, fakes.targets(), trials=8, fresh=True)[1]) == 3
    ((study, _),) = other._held.values()
    other._storage.set_study_user_attr(study, "owner", None)
    assert len(fakes.run(tmp_path, fakes.targets(), trials=8, fresh=True)[1]) == 3


@pytest.mark.parametrize("when", [1, 5, 20])
def test_a_run_whose_evaluations_are_deleted_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    quick, count = fakes.FakeBench.quick, iter(range(1000))

    def deleting(self: Any, target: Any, config: Any) -> Any:
        if next(count) == when:
            storage = open_storage(str(tmp_path / "journal"))
            for study in storage.get_all_studies():
                if not study.study_name.startswith("claim/"):
                    optuna.delete_study(study_name=study.study_name, storage=storage)
        return quick(self, target, config)

    monkeypatch.setattr(fakes.FakeBench, "quick", deleting)
    with pytest.raises(StorageError, match="deleted from the storage while it ran"):
        fakes.run(tmp_path, fakes.targets(), trials=100)
    # Its claim was given up all the same.
    assert len(fakes.run(tmp_path, fakes.targets(), trials=8, fresh=True)[1]) == 3


def test_the_command_says_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BOLE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cli.OfflineEvaluator, "start", lambda self: None)
    run = cli.Session.run

    def beside_another(self: Any) -> Any:
        assert Claims(open_storage(self.storage)).take(f"h100/{self.targets[0].kernels.key()}@0")
        return run(self)

    monkeypatch.setattr(cli.Session, "_spaces", lambda self, declared: dict.fromkeys(SEARCHED_OPS, "0"))
    monkeypatch.setattr(cli.Session, "run", beside_another)
    words = (
        "--gpu h100 --offline --hk 1 --hv 2 --dk 32 --dv 32 --nodes 16 --batch 1 --ops commit --precision fast --fresh"
    )
    assert cli.main([*words.split(), "--out", str(tmp_path / "out")]) == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("bole-tune: ")]
    assert "--fresh forgets evaluations that another run" in line
    assert not (tmp_path / "out" / "h100" / "gdn.json").exists()
