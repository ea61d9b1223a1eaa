"""Merging entries into a table file, safely beside other writers.

A writer takes an exclusive lock on the folder, reads the file, merges, writes a new file beside it and renames that
over the old one. A writer that dies at any point leaves the old file or the new one, never half of one, and the kernel
drops its lock.

A table may be a link: the file that it leads to is locked and replaced, whichever of its names a writer was given.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bole_runtime.tables.load import dump, load_file
from bole_runtime.tables.schema import AnyEntry, Entry, Header, TableFile


class LockTimeout(RuntimeError):
    """Another writer held the folder for too long."""


@dataclass(frozen=True)
class Merge:
    """What a merge did, as table keys.

    Attributes:
        added: new keys.
        replaced: keys whose entry was replaced.
        kept: keys whose measured entry was kept against a predicted one.
        path: the file.
    """

    added: tuple[str, ...]
    replaced: tuple[str, ...]
    kept: tuple[str, ...]
    path: Path


def real_file(path: Path) -> Path:
    """Return the file that a name stands for, at the end of all links; it need not exist.

    Raises:
        OSError: the links lead nowhere: to one another, or to a folder that is not there.
    """
    real = Path(os.path.realpath(path))
    if real.is_symlink():
        raise OSError(errno.ELOOP, "a link that leads to itself cannot be written through", str(path))
    if path.is_symlink() and not real.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "a link into a folder that is not there cannot be written", str(path))
    return real


@contextmanager
def locked(folder: Path, timeout: float = 60.0) -> Iterator[None]:
    """Hold an exclusive lock on a folder. The lock is on the folder itself, so no lock file is left behind.

    Raises:
        LockTimeout: another process held it for ``timeout`` seconds.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        limit = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                    raise
            if time.monotonic() >= limit:
                raise LockTimeout(f"another process has held the lock on {folder} for {timeout:g} s; try again later")
            time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file in one step, after its bytes have reached the disk. Of a link, what it leads to is replaced.

    Raises:
        OSError: it cannot be written.
    """
    path = real_file(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def check_target(path: Path, header: Header) -> TableFile | None:
    """Return the table that is at ``path``, None when there is none, before anything is merged into it.

    Raises:
        TableError: the file that is there is not a table.
        ValueError: it is a table of another GPU or family.
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = real_file(path).parent
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, "no permission to write tables here; choose another --out", str(folder))
    old = load_file(path) if path.exists() else None
    if old is not None and (old.gpu.key, old.family) != (header.gpu.key, header.family):
        raise ValueError(
            f"{path} is a table of {old.family} for {old.gpu.key}, not of {header.family} for {header.gpu.key}; "
            "choose another --out or move the file away"
        )
    return old


def merge_entries(path: Path, header: Header, entries: Sequence[AnyEntry], timeout: float = 60.0) -> Merge:
    """Merge ``entries`` into the table at ``path``, creating it if need be.

    A newer entry replaces the one of the same key, except that a predicted entry never replaces a measured one. The
    header becomes the new one; older entries keep the Triton version and the date that they were made with.

    Args:
        path: ``<out>/<gpu>/<family>.json``, of convolutions ``conv.json``.
        header: device, software and protocol of the run that made ``entries``.
        entries: new entries.
        timeout: seconds to wait for another writer.

    Raises:
        TableError: the file that is there is not a table; it is left as it is.
        ValueError: the file that is there is of another GPU or family.
        LockTimeout: another process held the lock for too long.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Once: a link that is turned meanwhile must not have one file locked and another written.
    real = real_file(path)
    with locked(real.parent, timeout):
        _remove_leftovers(real)
        old = check_target(real, header)
        table, merge = _merged(path, old, header, entries)
        data = dump(table)
        if not real.exists() or real.read_bytes() != data:
            write_atomically(real, data)
    return merge


def _merged(path: Path, old: TableFile | None, header: Header, entries: Sequence[AnyEntry]) -> tuple[TableFile, Merge]:
    by_key: dict[str, AnyEntry] = {}
    measured_before = False
    for entry in old.entries if old else ():
        assert old is not None
        measured_before = measured_before or entry.label == "measured"
        by_key[entry.key()] = msgspec.structs.replace(entry, triton=old.triton_of(entry), date=entry.date or old.date)
    added: list[str] = []
    replaced: list[str] = []
    kept: list[str] = []
    for entry in entries:
        key = entry.key()
        before = by_key.get(key)
        if before is not None and before.label == "measured" and entry.label == "predicted":
            kept.append(key)
            continue
        (added if before is None else replaced).append(key)
        by_key[key] = msgspec.structs.replace(
            entry, triton=entry.triton or header.gpu.triton, date=entry.date or header.date
        )
    for key in _outdone(by_key.values()):
        del by_key[key]
    # A prediction says nothing about a device: it must not replace what a measurement recorded of it.
    changed = bool(added or replaced)
    if old is not None and (not changed or (measured_before and all(e.label == "predicted" for e in entries))):
        header = old.header()
    plain = [
        msgspec.structs.replace(
            e,
            triton=None if e.triton == header.gpu.triton else e.triton,
            date=None if e.date == header.date else e.date,
        )
        for e in by_key.values()
    ]
    fields = {f: getattr(header, f) for f in header.__struct_fields__}
    return TableFile(**fields, entries=plain), Merge(tuple(added), tuple(replaced), tuple(kept), path)


def _outdone(entries: Iterable[AnyEntry]) -> list[str]:
    """Return keys of entries that are no faster than one for deeper trees, which serves theirs too."""
    deepest_first: dict[tuple[object, ...], list[Entry]] = {}
    # Convolutions are not told apart by depth.
    for entry in sorted((e for e in entries if isinstance(e, Entry)), key=lambda e: -e.depth):
        same = (entry.label, entry.triton, msgspec.structs.replace(entry, depth=0).key())
        deepest_first.setdefault(same, []).append(entry)
    found: list[str] = []
    for group in deepest_first.values():
        best = group[0].median_us
        for entry in group[1:]:
            if entry.median_us >= best:
                found.append(entry.key())
            best = min(best, entry.median_us)
    return found


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files of writers that were killed; no live one can be there while the lock is held."""
    for file in path.parent.glob(f".{path.name}.*.tmp"):
        file.unlink(missing_ok=True)
