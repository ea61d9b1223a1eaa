"""A wheel and an editable install both carry every module, template, table and preset, away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "bole_runtime": "bole_runtime",
    "bole_codegen": "codegen",
    "bole_templates": "templates",
    "bole_tuned": "tuned",
}
#: Files of a package that an install must carry.
KINDS = (".py", ".jinja", ".json", ".html", ".typed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Run away from the checkout: what a user of the installed packages relies on.
USE = """
import pathlib, sys
from importlib import resources
import bole_codegen.presets, bole_runtime, bole_runtime.gpus, bole_templates, bole_tuned
where = pathlib.Path(sys.argv[1])
for module in (bole_codegen, bole_runtime, bole_templates, bole_tuned):
    assert where in pathlib.Path(module.__file__).parents, module.__file__
assert bole_codegen.presets.get_preset("qwen3.5-9b").hk == 16
assert bole_runtime.gpus.get("h100").tables_from == ("h200",)
assert any(p.name.endswith(".jinja") for p in resources.files("bole_templates").iterdir())
for bare in ("codegen", "templates", "tuned"):
    try:
        __import__(bare)
    except ImportError:
        continue
    raise AssertionError(f"the install put a bare {bare!r} on the path")
"""


def _run(*command: str, cwd: Path, **env: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env={**clean, **env}, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what a build reads: building in the checkout would leave, and later pick up, a build folder."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy / name)
    for directory in PACKAGES.values():
        shutil.copytree(ROOT / directory, copy / directory, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def _files(directory: Path) -> set[str]:
    found = (path for path in directory.rglob("*") if path.suffix in KINDS and "__pycache__" not in path.parts)
    return {path.relative_to(directory).as_posix() for path in found}


def test_wheel_carries_everything(source: Path, tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip")
    _run(*pip, "wheel", str(source), "--no-deps", "--no-build-isolation", "-w", str(tmp_path / "wheels"), cwd=tmp_path)
    (wheel,) = (tmp_path / "wheels").glob("bole-*.whl")
    site = tmp_path / "site"
    _run(*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel), cwd=tmp_path)
    for name, directory in PACKAGES.items():
        assert _files(site / name) == _files(ROOT / directory), name
    assert {p.name for p in site.iterdir() if not p.name.endswith(".dist-info")} <= {*PACKAGES, "bin"}
    _run(sys.executable, "-c", USE, str(site), cwd=tmp_path, PYTHONPATH=str(site))


def test_editable_install_sees_new_subpackages(source: Path, tmp_path: Path) -> None:
    _run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"), cwd=tmp_path)
    python = str(tmp_path / "venv" / "bin" / "python")
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Plain paths: pip, setuptools and torch of this environment, but not its own editable install of the checkout.
    (site / "outer.pth").write_text("\n".join(p for p in sys.path if p.endswith("-packages")) + "\n")
    _run(python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "-e", str(source), cwd=tmp_path)
    _run(python, "-c", USE, str(source), cwd=tmp_path)
    deep = source / "codegen" / "added" / "later"
    deep.mkdir(parents=True)
    (deep.parent / "__init__.py").write_text("")
    (deep / "__init__.py").write_text("VALUE = 7\n")
    (source / "templates" / "added.py.jinja").write_text("# {{ x }}\n")
    check = (
        "import bole_codegen.added.later as m; from importlib import resources; assert m.VALUE == 7; "
        "assert resources.files('bole_templates').joinpath('added.py.jinja').is_file()"
    )
    _run(python, "-c", check, cwd=tmp_path)
