"""Packages and directories: the only part of the build that pyproject.toml cannot say.

The import names ``bole_codegen``, ``bole_templates`` and ``bole_tuned`` are mapped to directories of other names, so
that an install never puts a bare ``codegen`` or ``templates`` on a user's path. Declarative discovery cannot list
subpackages under a mapped name, so they are found here; a new subpackage needs no edit.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

PACKAGE_DIR = {
    "bole_runtime": "bole_runtime",
    "bole_codegen": "codegen",
    "bole_templates": "templates",
    "bole_tuned": "tuned",
}


def all_packages() -> list[str]:
    """Return the import name of every package and subpackage."""
    here = Path(__file__).resolve().parent
    names: list[str] = []
    for name, directory in PACKAGE_DIR.items():
        names.append(name)
        names += [f"{name}.{sub}" for sub in find_packages(str(here / directory))]
    return names


class FreshBuild(build_py):
    """A build of what the checkout holds now: setuptools copies over an earlier build and leaves what is gone."""

    def run(self) -> None:
        """Copy modules and data files into an empty folder; an editable install copies nothing."""
        if not self.editable_mode:
            for name in PACKAGE_DIR:
                shutil.rmtree(Path(self.build_lib) / name, ignore_errors=True)
        super().run()


setup(packages=all_packages(), package_dir=PACKAGE_DIR, cmdclass={"build_py": FreshBuild})
