"""The set-up script: which constraints it tries, when it starts over, what it leaves alone."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bole_dev", ROOT / "tools" / "dev.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    for name, value in {"VENV": venv, "PYTHON": venv / "bin" / "python", "STAMP": venv / "stamp.json"}.items():
        monkeypatch.setattr(module, name, value)
    return module


class FakePip:
    """Answers pip calls in turn and keeps their arguments."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        self.calls.append(arguments)
        code, text = self.answers.pop(0)
        return subprocess.CompletedProcess(arguments, code, text, "")


CONFLICT = (1, "ERROR: ResolutionImpossible: for help visit")


def test_falls_back_when_the_index_has_only_the_cuda_build(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip((0, ""), CONFLICT, (0, ""))
    monkeypatch.setattr(dev, "pip", pip)
    dev.install("dev", None)
    assert [call[1] for call in pip.calls[1:]] == ["constraints.txt", "constraints-cuda.txt"]
    assert pip.calls[1][-1] == ".[dev]"


def test_another_failure_is_not_retried(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip((0, ""), (1, "no space left on device"))
    monkeypatch.setattr(dev, "pip", pip)
    with pytest.raises(SystemExit, match="installation failed"):
        dev.install("", None)
    assert len(pip.calls) == 2


def test_a_base_torch_is_kept(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip((0, ""), (0, ""))
    monkeypatch.setattr(dev, "pip", pip)
    dev.VENV.mkdir()
    dev.install("test", {"torch": "2.11.0+cu130", "triton": "3.6.0", "paths": []})
    assert Path(pip.calls[1][1]).read_text() == "torch==2.11.0+cu130\ntriton==3.6.0\n"


def test_second_run_installs_nothing(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def create(base: object) -> None:
        made.append("venv")
        dev.PYTHON.parent.mkdir(parents=True, exist_ok=True)
        dev.PYTHON.touch()

    monkeypatch.setattr(dev, "base_torch", lambda: None)
    monkeypatch.setattr(dev, "create_venv", create)
    monkeypatch.setattr(dev, "install", lambda extra, base: made.append(extra))
    dev.setup("")
    dev.setup("")
    dev.setup("dev")
    dev.setup("test")
    assert made == ["venv", "", "dev"]
    monkeypatch.setattr(dev, "fingerprint", lambda: "changed requirements")
    dev.setup("dev")
    assert made == ["venv", "", "dev", "dev"]


def test_old_python_is_refused(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev.sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit, match=r"Python 3\.10 or later"):
        dev.setup("")


SEARCH = ["--model", "qwen3.5-9b"]
OFFLINE = ["--offline", "--gpu", "h100"]


@pytest.mark.parametrize(
    ("key", "arguments", "added"),
    [
        ("h200", SEARCH, ["--out", "bole-out"]),
        ("", SEARCH, ["--out", "bole-out", *OFFLINE]),
        ("", ["--gpu", "h200", *SEARCH], ["--out", "bole-out", "--offline"]),
        ("", ["--gpu=h200", "--out=mine"], ["--offline"]),
        ("", ["--out", "tuned", *OFFLINE], []),
        # As argparse takes them, shortened.
        ("", ["--of", "--ou", "mine"], []),
        ("", ["--ops", "verify", "--offline"], ["--out", "bole-out"]),
        # A search too, which writes a table.
        ("", ["--exhaustive", "--gpu", "h100"], ["--out", "bole-out"]),
    ],
)
def test_a_search_leaves_the_shipped_tables_alone(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, key: str, arguments: list[str], added: list[str]
) -> None:
    monkeypatch.setattr(dev, "gpu_key", lambda: key)
    assert dev.tune_arguments(arguments) == [*added, *arguments]


def test_a_search_without_arguments_is_short(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev, "gpu_key", lambda: "")
    assert dev.tune_arguments([]) == ["--out", "bole-out", *OFFLINE, *dev.SHORT_SEARCH]
    monkeypatch.setattr(dev, "gpu_key", lambda: "h200")
    assert dev.tune_arguments([]) == ["--out", "bole-out", *dev.SHORT_SEARCH]


@pytest.mark.parametrize(
    "arguments",
    [["--gpu", "h200", "--show"], ["--diff", "a", "b"], ["--explain=KEY"], ["--verify"], ["--stale"], ["--rep", "KEY"]],
)
def test_actions_read_the_shipped_tables(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(dev, "gpu_key", lambda: pytest.fail("the GPU was asked for"))
    assert dev.tune_arguments(arguments) == arguments


def test_every_action_is_known(dev: ModuleType) -> None:
    from bole_codegen.actions import ACTIONS

    assert {f"--{action}" for action in ACTIONS} == set(dev.READS_TABLES) - {"--version"}


@pytest.mark.parametrize("job", ["tune", "test", "lint", "setup"])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_of_a_job_sets_nothing_up(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], job: str, flag: str
) -> None:
    for name in ("setup", "run"):
        monkeypatch.setattr(dev, name, lambda *_: pytest.fail("something was started"))
    assert dev.main([job, flag]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"python3 tools/dev.py {job}")
    assert not dev.VENV.exists()


def test_usage() -> None:
    shown = subprocess.run([sys.executable, "tools/dev.py"], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 2
    assert "python3 tools/dev.py test" in shown.stdout
