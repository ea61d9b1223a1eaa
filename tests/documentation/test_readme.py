"""What the documents tell a reader to run or open exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def _python_blocks() -> list[tuple[str, str]]:
    return [(d.name, block) for d in DOCUMENTS for block in re.findall(r"```python\n(.*?)```", d.read_text(), re.S)]


@pytest.mark.parametrize("block", [b for _, b in _python_blocks()], ids=[n for n, _ in _python_blocks()])
def test_python_examples_run(block: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if "from transformers import" in block:
        pytest.importorskip("transformers", reason="needs transformers: pip install '.[models]'")
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "example", "exec"), {"__name__": "example"})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


def test_the_two_commands_of_the_quick_start() -> None:
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"^    (python3 .*)$", text, re.M)
    assert commands == ["python3 tools/dev.py tune", "python3 tools/dev.py test"]
    shown = subprocess.run([sys.executable, "tools/dev.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0
    assert all(command in shown.stdout for command in commands)
    assert commands[1] in (ROOT / ".ci" / "run").read_text()
