"""The kernels of a table, as files for people to read and for packages to ship: ``<out>/<gpu>/kernels/<name>.py``.

The runtime takes kernels from its own package or renders them; it never runs a file of another table's folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bole_codegen.tables.writer import locked, write_atomically
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config, Variant
from bole_runtime.tables.load import load_table

Render = Callable[[Specialisation, Config], Sequence[Any]]
#: Names that the renderer gives: a readable stem and eight hex digits.
_GENERATED = re.compile(r"\A[a-z][a-z0-9_]*_[0-9a-f]{8}\.py\Z")


def write_kernels(folder: Path, render: Render, variants: Callable[[str], Sequence[Variant]]) -> int:
    """Bring ``folder/kernels`` in line with the tables in ``folder``; return the number of kernels.

    Files that are as they should be are left alone. Generated files that no table names are removed, others are not
    touched. An entry whose kernels have changed since, or are rendered under another name, has none.

    Args:
        folder: of one GPU, with its ``*.json``.
        render: problem and configuration to kernels.
        variants: op -> declared variants.

    Raises:
        OSError: a file cannot be written, as where a folder has its name.
    """
    wanted: dict[str, str] = {}
    with locked(folder):
        for path in sorted(folder.glob("*.json")):
            for entry in load_table(path, variants).entries:
                named = {k.name: k.text_hash for k in entry.entry.kernels}
                for kernel in render(entry.problem, entry.config):
                    if named.get(kernel.name) == kernel.text_hash:
                        wanted[f"{kernel.name}.py"] = kernel.source
        place = folder / "kernels"
        if wanted:
            place.mkdir(exist_ok=True)
        for name, source in wanted.items():
            target, data = place / name, source.encode()
            # Of bytes: what somebody made of a file need be no text.
            if not target.is_file() or target.read_bytes() != data:
                write_atomically(target, data)
        for file in place.glob("*.py"):
            if (
                file.name not in wanted
                and _GENERATED.match(file.name)
                and not (file.is_dir() and not file.is_symlink())
            ):
                file.unlink()
    return len(wanted)
