"""Schema, loading and rewriting. Every attack here must end in a reason, never in a value that is used."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import table_fakes as fakes

from bole_runtime.tables import load as load_module
from bole_runtime.tables.load import TableError, dump, load_file, load_table, table_path
from bole_runtime.tables.schema import MAX_FILE_BYTES, ConvEntry, Entry


def test_round_trip_is_byte_identical_and_ordered(tmp_path: Path) -> None:
    entries = [fakes.entry(fakes.PROBLEM.replace(work=w, nodes=n)) for w in (32, 256, 4096) for n in (16, 64)]
    random.Random(0).shuffle(entries)
    path = fakes.write(tmp_path, *entries)
    first = path.read_bytes()
    assert dump(load_file(path)) == first
    loaded = load_table(path, fakes.variants)
    assert not loaded.skipped
    assert [e.problem for e in loaded.entries] == sorted(e.problem() for e in entries)
    assert loaded.entries[0].config == fakes.FUSED.config({"BV": 64, "STAGES": 1, "MODE": "rhs"})


def test_one_changed_number_changes_one_line(tmp_path: Path) -> None:
    entries = [fakes.entry(fakes.PROBLEM.replace(work=w)) for w in (32, 64, 128)]
    before = dump(fakes.table(*entries)).splitlines()
    after = dump(
        fakes.table(entries[0], fakes.entry(fakes.PROBLEM.replace(work=64), median_us=9.25), entries[2])
    ).splitlines()
    assert len(before) == len(after)
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


def test_every_field_is_written() -> None:
    written = [name for group in load_module._LINES for name in group]
    assert sorted(written) == sorted({*Entry.__struct_fields__, *ConvEntry.__struct_fields__})
    json.loads(dump(fakes.table()))


def _set(field: str, value: Any) -> Any:
    return lambda data: data["entries"][0].__setitem__(field, value)


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        (_set("variant", "../../../etc/passwd"), "entries[0].variant", "matching regex"),
        (_set("variant", "other"), "entries[0]", "no variant 'other'"),
        (_set("dk", 10**30), "entries[0].dk", "<= 4096"),
        (_set("work", 10**15), "entries[0].work", "<="),
        (_set("work", 33), "entries[0]", "power of two"),
        (_set("nodes", 17), "entries[0]", "nodes = 17"),
        (_set("median_us", "5"), "entries[0].median_us", "float"),
        (_set("median_us", -1.0), "entries[0].median_us", ">="),
        (_set("exec", "import os"), "entries[0]", "unknown field `exec`"),
        (_set("params", {"BV": 48, "STAGES": 1, "MODE": "rhs"}), "entries[0]", "BV = 48"),
        (_set("params", {"BV": True, "STAGES": 1, "MODE": "rhs"}), "entries[0]", "BV = True"),
        (_set("params", {"BV": "64", "STAGES": 1, "MODE": "rhs"}), "entries[0]", "BV = '64'"),
        (_set("params", {"BV": 64, "STAGES": 1, "MODE": "rhs", "Z": 1}), "entries[0]", "no parameter 'Z'"),
        (_set("params", {"BV": 64, "STAGES": 1}), "entries[0]", "MODE"),
        (_set("params", {"{{ 1 }}": 64}), "entries[0].params", "matching regex"),
        (_set("params", {"BV": [64]}), "entries[0].params", "Expected"),
        (_set("family", "kda"), "entries[0]", "family 'kda'"),
        (_set("precision", "exact"), "entries[0].precision", "Invalid enum"),
        (
            _set("kernels", [{"name": "x/y", "text_hash": "0123456789abcdef"}]),
            "entries[0].kernels[0].name",
            "matching regex",
        ),
        (lambda data: data["entries"][0].pop("group"), "entries[0]", "missing required field `group`"),
        (lambda data: data["entries"].append(data["entries"][0]), "entries[2]", "second entry"),
    ],
)
def test_a_bad_entry_is_skipped_with_its_reason(tmp_path: Path, change: Any, field: str, message: str) -> None:
    good = fakes.entry(fakes.PROBLEM.replace(work=1024))
    path = fakes.write(tmp_path, fakes.entry(), good)
    fakes.edit(path, change)
    loaded = load_table(path, fakes.variants)
    assert good.problem() in [e.problem for e in loaded.entries]
    ((where, reason),) = [s for s in loaded.skipped if s[0].startswith(field)] or [("", str(loaded.skipped))]
    assert where.startswith(field)
    assert message in reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("gpu"), "gpu"),
        (lambda d: d.update(extra=1), "extra"),
        (lambda d: d.update(schema_version=99), "schema_version"),
        (lambda d: d.update(schema_version=99, entries={}, later="field"), "schema_version"),
        (lambda d: d["gpu"].update(key="../h200"), "gpu.key"),
        (lambda d: d["gpu"].update(clocks="a\nb"), "gpu.clocks"),
        (lambda d: d["gpu"].update(compute_capability=[9]), "gpu.compute_capability"),
        (lambda d: d.update(date="yesterday"), "date"),
        (lambda d: d.update(entries={}), "entries"),
    ],
)
def test_a_broken_file_names_file_and_field(tmp_path: Path, change: Any, words: str) -> None:
    path = fakes.write(tmp_path, fakes.entry())
    fakes.edit(path, change)
    with pytest.raises(TableError) as caught:
        load_table(path, fakes.variants)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"schema_version": 1e999}'])
def test_what_is_not_a_table_is_one_clear_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "gdn.json"
    path.write_bytes(data)
    with pytest.raises(TableError, match=r"gdn\.json"):
        load_table(path, fakes.variants)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "gdn.json"
    with open(path, "wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(TableError, match="bytes is more than"):
        load_table(path, fakes.variants)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "UPPER", "x" * 65, "a\n"])
def test_a_name_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="plain lower-case word"):
        table_path(tmp_path, name, "gdn")
    with pytest.raises(ValueError, match="plain lower-case word"):
        table_path(tmp_path, "h200", name)
