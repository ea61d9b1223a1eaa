"""What the text of a kernel is told by: its name ends in a hash of its code, its header holds one of all templates."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
from pathlib import Path

#: Stands for the name of a kernel in the text that is hashed.
PLACEHOLDER = "KERNEL_NAME"
_COMMENT = re.compile(r"^\s*#.*$|\s+#\s.*$", re.MULTILINE)


def text_hash(source: str) -> str:
    """Return the hash of a kernel's text without comments and blank lines, 16 hex digits."""
    lines = (line.rstrip() for line in _COMMENT.sub("", source).splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()[:16]


def kernel_hash(source: str, name: str, options: object) -> str:
    """Return the hash of a kernel of a name with its launch options: part of what was measured, not of the code."""
    return text_hash(f"{source.replace(name, PLACEHOLDER)}\n{options}")


def template_dir() -> Path | None:
    """Return the folder the templates are installed in, None where they are not."""
    spec = importlib.util.find_spec("bole_templates")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


@functools.lru_cache(maxsize=1)
def template_hash() -> str:
    """Return one hash over every template file, 12 hex digits; empty where there are none."""
    folder = template_dir()
    if folder is None:
        return ""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.jinja")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
