"""Reading and rewriting table files. Data only: nothing in a table's folder is ever executed."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config, Variant
from bole_runtime.tables.schema import (
    MAX_ENTRIES,
    MAX_FILE_BYTES,
    SCHEMA_VERSION,
    AnyEntry,
    Header,
    TableFile,
    bucket_reason,
    entry_type,
)

#: op -> variants, as ``bole_runtime.kernels.variants.all_variants`` gives them.
VariantLookup = Callable[[str], Iterable[Variant]]

_PLAIN_NAME = re.compile(r"\A[a-z0-9][a-z0-9_-]{0,63}\Z")
_FIELD = re.compile(r" - at (?:`key` in )?`(?P<path>[^`]*)`\Z")
# One entry a block: these groups of fields share a line, so that a diff shows what changed and nothing else.
# Left out where an entry does not say it, as entries of before do not: their files keep their bytes.
_LAUNCH: tuple[str, ...] = ("hk", "hv", "batch", "shape")
_LINES: tuple[tuple[str, ...], ...] = (
    (
        "op",
        "family",
        "dk",
        "dv",
        "group",
        "channels",
        "width",
        "length",
        "in_dtype",
        "state_dtype",
        "gate_mode",
        "precision",
        "bias",
        "silu",
        "dynamic",
    ),
    ("nodes", "depth", "pending", "work"),
    ("variant", "params", "timed_channels"),
    _LAUNCH,
    ("median_us", "spread_us", "floor_us", "ratio", "error", "default_us", "margin", "label", "trials"),
    ("runner_up",),
    ("transferred_from",),
    ("triton", "date"),
    ("kernels",),
)


class TableError(ValueError):
    """A table file that cannot be used. Names the file and the field."""

    def __init__(self, path: Path | str, field: str, message: str) -> None:
        super().__init__(f"table {path}: {field}: {message}" if field else f"table {path}: {message}")
        self.path = Path(path)
        self.field = field


class _RawFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema_version: int
    family: msgspec.Raw
    gpu: msgspec.Raw
    protocol: msgspec.Raw
    date: msgspec.Raw
    entries: list[msgspec.Raw]


class _VersionOnly(msgspec.Struct, frozen=True):
    """What a file of any version has: read first, since another version has other fields as well."""

    schema_version: int


class _Op(msgspec.Struct, frozen=True):
    """What tells which schema an entry has."""

    op: str = ""


@dataclass(frozen=True)
class CheckedEntry:
    """An entry whose variant and parameters are declared, with the file that it came from."""

    entry: AnyEntry
    problem: Specialisation
    config: Config
    triton: str
    path: str
    gpu_key: str

    @property
    def key(self) -> str:
        """The table key."""
        return self.problem.key()


@dataclass(frozen=True)
class LoadedTable:
    """A table after every check.

    Attributes:
        path: the file.
        header: everything of the file except its entries.
        entries: usable entries, in file order.
        skipped: ``entries[i]`` and the reason, for every entry that is not usable.
    """

    path: Path
    header: Header
    entries: tuple[CheckedEntry, ...]
    skipped: tuple[tuple[str, str], ...]


def table_path(root: Path, gpu_key: str, family: str) -> Path:
    """Return ``root/gpu_key/family.json``, refusing names that would leave the folder.

    Raises:
        ValueError: a name is not a plain lower-case word.
    """
    for what, name in (("GPU key", gpu_key), ("family", family)):
        if not _PLAIN_NAME.match(name):
            raise ValueError(f"{what} {name!r} is not a plain lower-case word")
    return root / gpu_key / f"{family}.json"


def _split(error: Exception, prefix: str) -> tuple[str, str]:
    text = str(error)
    found = _FIELD.search(text)
    if found is None:
        return prefix, text
    path = found["path"].removeprefix("$").removeprefix(".")
    field = f"{prefix}.{path}" if prefix and path else prefix or path
    return field, text[: found.start()]


def _read(path: Path) -> bytes:
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):  # To read a named pipe would wait for ever.
            what = "a folder" if stat.S_ISDIR(info.st_mode) else "no file"
            raise TableError(path, "", f"is {what}; a table is a file")
        if info.st_size > MAX_FILE_BYTES:
            raise TableError(path, "", f"{info.st_size} bytes is more than the {MAX_FILE_BYTES} that a table may have")
        return path.read_bytes()
    except OSError as error:
        raise TableError(path, "", f"cannot be read: {error.strerror or error}") from error


def _header(path: Path, data: bytes) -> tuple[Header, list[msgspec.Raw]]:
    try:
        version = msgspec.json.decode(data, type=_VersionOnly).schema_version
        raw = None if version != SCHEMA_VERSION else msgspec.json.decode(data, type=_RawFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TableError(path, *_split(error, "")) from error
    if raw is None:
        raise TableError(
            path,
            "schema_version",
            f"{version} is not {SCHEMA_VERSION}, the version that this release reads; "
            "write the table again with this release's bole-tune",
        )
    if len(raw.entries) > MAX_ENTRIES:
        raise TableError(path, "entries", f"{len(raw.entries)} entries are more than {MAX_ENTRIES}")
    values: dict[str, Any] = {"schema_version": raw.schema_version}
    for name in ("family", "gpu", "protocol", "date"):
        try:
            kind = Header.__annotations__[name]
            values[name] = msgspec.json.decode(getattr(raw, name), type=_TYPES.get(name, kind))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise TableError(path, *_split(error, name)) from error
    return Header(**values), raw.entries


_TYPES: dict[str, Any] = {f.name: f.type for f in msgspec.structs.fields(Header)}


def _entry(raw: msgspec.Raw) -> AnyEntry:
    """Decode an entry by the schema of its operation.

    Raises:
        MsgspecError: it breaks the schema.
    """
    try:
        op = msgspec.json.decode(raw, type=_Op).op
    except msgspec.MsgspecError:
        op = ""  # The decoder of the whole entry says what is wrong.
    return msgspec.json.decode(raw, type=entry_type(op))


def load_file(path: Path) -> TableFile:
    """Read a table with every entry valid by the schema; for tools that rewrite it.

    Raises:
        TableError: the file or any entry breaks the schema.
    """
    header, raws = _header(path, _read(path))
    entries = []
    for i, raw in enumerate(raws):
        try:
            entries.append(_entry(raw))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise TableError(path, *_split(error, f"entries[{i}]")) from error
    return TableFile(**{f: getattr(header, f) for f in header.__struct_fields__}, entries=entries)


def load_table(path: Path, variants: VariantLookup) -> LoadedTable:
    """Read a table; entries that break the schema or the declared parameter space are skipped with a reason.

    Raises:
        TableError: the file itself is not a table.
    """
    header, raws = _header(path, _read(path))
    declared: dict[str, dict[str, Variant]] = {}
    entries: list[CheckedEntry] = []
    skipped: list[tuple[str, str]] = []
    seen: set[Specialisation] = set()
    for i, raw in enumerate(raws):
        place = f"entries[{i}]"
        try:
            entry = _entry(raw)
        except (msgspec.MsgspecError, RecursionError) as error:
            field, message = _split(error, place)
            skipped.append((field, message))
            continue
        if entry.op not in declared:
            declared[entry.op] = {v.name: v for v in variants(entry.op)}
        try:
            config = _config(entry, header, declared[entry.op])
        except ValueError as error:
            skipped.append((place, str(error)))
            continue
        problem = entry.problem()
        if problem in seen:
            skipped.append((place, f"a second entry for {problem.key()}"))
            continue
        seen.add(problem)
        triton = entry.triton or header.gpu.triton
        entries.append(CheckedEntry(entry, problem, config, triton, str(path), header.gpu.key))
    return LoadedTable(path, header, tuple(entries), tuple(skipped))


def _config(entry: AnyEntry, header: Header, declared: Mapping[str, Variant]) -> Config:
    reason = bucket_reason(entry)
    if reason is not None:
        raise ValueError(reason)
    if entry.family != header.family:
        raise ValueError(f"family {entry.family!r} in a file of {header.family!r}")
    variant = declared.get(entry.variant)
    if variant is None:
        raise ValueError(f"{entry.op} has no variant {entry.variant!r}")
    return variant.config(entry.params)


def canonical(table: TableFile) -> TableFile:
    """Return ``table`` with its entries in the one order that files are written in."""
    return msgspec.structs.replace(table, entries=sorted(table.entries, key=order))


def order(entry: AnyEntry) -> tuple[str, Any]:
    """Return what entries are sorted by. Problems compare within an operation."""
    return entry.op, entry.problem()


def dump(table: TableFile) -> bytes:
    """Return the bytes of a table file. Equal tables give equal bytes, whatever the order of their entries."""
    plain: dict[str, Any] = msgspec.to_builtins(canonical(table))
    entries = plain.pop("entries")
    head = json.dumps(plain, indent=2, ensure_ascii=False)
    blocks = []
    for entry in entries:
        for holder in (entry, entry["runner_up"] or {}):
            if "params" in holder:
                holder["params"] = dict(sorted(holder["params"].items()))
        for name in _LAUNCH:
            if entry.get(name, "") is None:
                del entry[name]
        lines = []
        for group in _LINES:
            fields = [f"{json.dumps(n)}: {json.dumps(entry[n], ensure_ascii=False)}" for n in group if n in entry]
            if fields:
                lines.append("      " + ", ".join(fields))
        blocks.append("    {\n" + ",\n".join(lines) + "\n    }")
    body = "[\n" + ",\n".join(blocks) + "\n  ]" if blocks else "[]"
    return (head[: head.rindex("\n}")] + f',\n  "entries": {body}\n}}\n').encode()
