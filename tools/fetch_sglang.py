#!/usr/bin/env python3
"""Downloads the SGLang wheels that the plug-in is checked against, and unpacks their Python sources.

    python tools/fetch_sglang.py FOLDER
    BOLE_SGLANG_WHEELS=FOLDER python -m pytest tests/integrations/test_sglang_seams.py

FOLDER gets one folder a version. Nothing is installed and nothing of SGLang is run. Needs pip and 55 MB of downloads.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SEAMS = Path(__file__).resolve().parent.parent / "bole_runtime" / "integrations" / "sglang" / "seams.py"
# Wheels are for one Python and Linux; what is read of them is for all.
PLATFORM = ("--python-version", "3.11", "--implementation", "cp", "--platform", "manylinux_2_34_x86_64")


def known_versions() -> tuple[str, ...]:
    """Return the versions that seams.py names, without importing the package, which needs torch."""
    for node in ast.parse(SEAMS.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "KNOWN_VERSIONS":
            return tuple(ast.literal_eval(node.value))
    raise SystemExit(f"{SEAMS}: no KNOWN_VERSIONS")


def fetch(version: str, folder: Path) -> None:
    """Download one wheel and unpack its sources, unless they are there."""
    target = folder / version
    if (target / "sglang").is_dir():
        print(f"{target}: there already")
        return
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *PLATFORM]
        done = subprocess.run([*command, "--dest", temporary, f"sglang=={version}"])
        if done.returncode != 0:
            raise SystemExit(f"pip could not download sglang=={version}; its messages are above")
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.startswith("sglang/srt/") and n.endswith(".py")]
            archive.extractall(target, names)
    print(f"{target}: {len(names)} files")


def main() -> None:
    """Fetch every version."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    for version in known_versions():
        fetch(version, options.folder)


if __name__ == "__main__":
    main()
