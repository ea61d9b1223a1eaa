"""Which table entries have been checked on this machine under the Triton installed here.

An entry written under another Triton minor version, or one that was only ever predicted, is used once ``warmup()``
has run it against the reference here. That result is kept in a small file, private to the user.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bole_runtime.tables.load import CheckedEntry

_VERSION = 1
_MAX_BYTES = 4 << 20
_MAX_CHECKS = 20_000
_DIGEST = re.compile(r"\A[0-9a-f]{64}\Z")


def cache_dir() -> Path:
    """Return the user's cache folder: ``BOLE_CACHE_DIR``, else ``~/.cache/bole``."""
    own = os.environ.get("BOLE_CACHE_DIR")
    return Path(own) if own else Path.home() / ".cache" / "bole"


def minor(version: str) -> str:
    """Return the major and minor part of a version."""
    return ".".join(version.split("+")[0].split(".")[:2])


class CheckStore:
    """Digests of entries that passed a check here. Reading never fails: a damaged file counts as empty."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._known: dict[str, None] | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return (self._folder or cache_dir()) / "checked.json"

    def digest(self, entry: CheckedEntry, device_name: str, triton: str) -> str:
        """Return what identifies one check: the device, the Triton version, the key, the choice and its kernels."""
        parts = [
            device_name,
            triton,
            entry.key,
            str(entry.config),
            *(k.text_hash for k in entry.entry.kernels),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def has(self, digest: str) -> bool:
        """Return whether a check is on record."""
        if self._known is None:
            self._known = self._read()
        return digest in self._known

    def add(self, digest: str) -> None:
        """Record a check. A folder that cannot be written keeps it for this process only."""
        known = self._read()
        known.update(self._known or {})
        known[digest] = None
        self._known = known
        kept = list(known)[-_MAX_CHECKS:]
        with contextlib.suppress(OSError):
            self._write(json.dumps({"version": _VERSION, "checked": kept}, indent=0))

    def _read(self) -> dict[str, None]:
        try:
            with open(self.path, "rb") as file:
                info = os.fstat(file.fileno())
                # Another user could otherwise declare a kernel checked.
                if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    return {}
                if info.st_size > _MAX_BYTES:
                    return {}
                data = json.loads(file.read())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(data, dict) or data.get("version") != _VERSION or not isinstance(data.get("checked"), list):
            return {}
        return {d: None for d in data["checked"] if isinstance(d, str) and _DIGEST.match(d)}

    def _write(self, text: str) -> None:
        folder = self.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".checked-")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(temporary, self.path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
