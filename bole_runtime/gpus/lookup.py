"""Lookup of GPU records by key, alias or exact device name. Never by part of a name."""

from __future__ import annotations

import difflib
import json
import re
from functools import cache
from importlib import resources
from typing import Any

from bole_runtime.gpus.record import GpuRecord

# "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "... MIG 1g.10gb+me": a slice of a GPU, with a part of its SMs, L2 and bandwidth.
_MIG = re.compile(r"^(?P<parent>.+?) MIG (?P<profile>\S+)$", re.IGNORECASE)


class UnknownGpuError(ValueError):
    """A GPU word or device name that no record has."""


def _record(fields: dict[str, Any]) -> GpuRecord:
    """Build a record from one JSON object."""
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return GpuRecord(**plain)


@cache
def all_records() -> tuple[GpuRecord, ...]:
    """Return every known GPU, sorted by key. The file is read at the first call."""
    text = resources.files(__package__).joinpath("gpus.json").read_text(encoding="utf-8")
    return tuple(_record(fields) for fields in json.loads(text))


@cache
def _by_device_name() -> dict[str, GpuRecord]:
    return {name: record for record in all_records() for name in record.device_names}


@cache
def _by_word() -> dict[str, GpuRecord]:
    words: dict[str, GpuRecord] = {}
    for record in all_records():
        for word in (record.key, *record.aliases, *record.device_names):
            words[_normalise(word)] = record
    return words


def _normalise(word: str) -> str:
    return re.sub(r"[\s_]+", "-", word.strip()).lower()


def get(word: str) -> GpuRecord:
    """Return the GPU a user names by key (``h200``), alias (``h100-sxm``) or exact device name.

    Case does not matter, and blanks and underscores count as hyphens; the whole word must match.

    Raises:
        UnknownGpuError: no record has this word. The message lists close matches and the known keys.
    """
    record = _by_word().get(_normalise(word))
    if record is not None:
        return record
    if _MIG.match(word):
        raise UnknownGpuError(explain_device_name(word))
    close = difflib.get_close_matches(_normalise(word), _by_word(), n=3, cutoff=0.7)
    hint = f" Did you mean {' or '.join(sorted({_by_word()[c].key for c in close}))}?" if close else ""
    known = ", ".join(r.key for r in all_records())
    raise UnknownGpuError(f"unknown GPU {word!r}.{hint} Known: {known}")


def identify(device_name: str) -> GpuRecord | None:
    """Return the record whose device name is exactly ``device_name`` (as torch reports it), or None.

    A MIG slice is not the GPU it was cut from, so it gives None; :func:`explain_device_name` says why.
    """
    return _by_device_name().get(device_name)


def explain_device_name(device_name: str) -> str:
    """Return one sentence for people on how Bole sees a device name."""
    record = identify(device_name)
    if record is not None:
        tail = "" if record.supported else f", which is not supported: {record.reason}"
        return f"{device_name!r} is {record.title} (key {record.key}){tail}"
    mig = _MIG.match(device_name)
    if mig:
        parent = identify(mig["parent"])
        whole = f"{parent.title} (key {parent.key})" if parent else repr(mig["parent"])
        return (
            f"{device_name!r} is a MIG slice ({mig['profile']}) of {whole}; a slice has a part of its multiprocessors, "
            "L2 and bandwidth, so that GPU's tables do not apply and the analytic default is used"
        )
    return (
        f"{device_name!r} is not in Bole's GPU records, so no table applies and the analytic default is used; "
        "a record is added in bole_runtime/gpus/gpus.json"
    )


def table_keys(record: GpuRecord) -> tuple[str, ...]:
    """Return the table folders to look in for a GPU: its own first, then the declared stand-ins."""
    return (record.key, *record.tables_from)
