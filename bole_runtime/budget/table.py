"""Calibration tables: the measured time of the complete forward, as JSON. Data from others: every field is checked.

This module imports msgspec, so nothing imports it until a table is read or written.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

SCHEMA_VERSION = 1
MAX_FILE_BYTES = 4 << 20
MAX_ENTRIES = 20_000
_TEMPORARY = ".calibration."  # no part of the file's name, which may be as long as a name can be

Line = Annotated[str, Meta(max_length=400, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
Positive = Annotated[int, Meta(ge=1, le=1 << 31)]
Micros = Annotated[float, Meta(gt=0.0, le=1e9)]
Day = Annotated[str, Meta(pattern=r"\A\d{4}-\d{2}-\d{2}\Z")]


class CalibrationError(ValueError):
    """A calibration file that cannot be used, a question it cannot answer, or a calibration that did not end.

    Names the file, the question or what failed.

    Attributes:
        table: of a calibration that did not end, what is whole of it; None if nothing is.
    """

    table: CalibrationTable | None = None


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, order=True):
    """The time of one complete forward.

    Attributes:
        batch: requests.
        nodes: nodes a request; 1 is plain decoding.
        kv: context length.
        depth: depth of the tree.
        median_us: median of the repeats.
        spread_us: distance between their quartiles.
        repeats: how many there were; 0 in a model.
    """

    batch: Positive
    kv: Count
    depth: Count
    nodes: Positive
    median_us: Micros
    spread_us: Annotated[float, Meta(ge=0.0, le=1e9)]
    repeats: Count


class _Version(msgspec.Struct, frozen=True):
    schema_version: int


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    schema_version: Annotated[int, Meta(ge=1, le=1_000_000)]
    label: Literal["measured", "model"]
    name: Line
    device: Line
    torch: Line
    date: Day
    protocol: Line
    entries: Annotated[list[Timing], Meta(max_length=MAX_ENTRIES)]


class CalibrationTable:
    """Times of the complete forward, and what is between them.

    Batch, context length and depth are taken at the next calibrated value upward (beyond the largest is an error);
    nodes are interpolated linearly between calibrated ones. A tree of N nodes is never deeper than N - 1, whatever
    depth is asked for; a tree size that could not run as deep as asked is left out.

    Attributes:
        label: ``measured``, or ``model`` for times that nobody measured.
        name: what was calibrated.
        device: exact device name.
        entries: timings in order.
    """

    def __init__(
        self,
        entries: list[Timing],
        *,
        name: str,
        device: str,
        date: str,
        label: Literal["measured", "model"] = "measured",
        torch_version: str = "",
        protocol: str = "",
    ) -> None:
        """Check and index the timings.

        Raises:
            CalibrationError: there is none, two are for the same point, or decoding (nodes 1) is missing somewhere.
        """
        self.label, self.name, self.device, self.date = label, name, device, date
        self.torch_version, self.protocol = torch_version, protocol
        self.entries = sorted(entries)
        if not self.entries:
            raise CalibrationError("entries: at least one timing is needed")
        # batch -> kv -> nodes -> depth -> time
        self._index: dict[int, dict[int, dict[int, dict[int, float]]]] = {}
        for e in self.entries:
            group = self._index.setdefault(e.batch, {}).setdefault(e.kv, {}).setdefault(e.nodes, {})
            if e.depth in group:
                raise CalibrationError(f"entries: two timings for {(e.batch, e.kv, e.nodes, e.depth)}")
            group[e.depth] = e.median_us
        for batch, lengths in self._index.items():
            for kv, by_nodes in lengths.items():
                if 1 not in by_nodes:
                    raise CalibrationError(f"entries: batch {batch}, kv {kv} has no timing of nodes 1")

    @property
    def batches(self) -> list[int]:
        """Calibrated batch sizes."""
        return sorted(self._index)

    def _times(self, batch: int, kv: int, depth: int | None) -> dict[int, float]:
        """Return the time by nodes; a tree of N nodes is never deeper than N - 1."""
        for what, value, low in (("batch", batch, 1), ("kv", kv, 0), ("depth", 0 if depth is None else depth, 0)):
            if not value >= low:
                raise CalibrationError(f"{what}: {value} is not allowed; allowed: {low} or more")
        lengths = self._index[_upward("batch", batch, self._index)]
        group = lengths[_upward("kv", kv, lengths)]
        if depth is not None:
            # Otherwise only trees too small to be that deep would be left, as if larger ones did not pay.
            _upward("depth", min(depth, max(group) - 1), {d for by_depth in group.values() for d in by_depth})
        times = {}
        for nodes, by_depth in group.items():
            wanted = max(by_depth) if depth is None else min(depth, nodes - 1)
            deep = [d for d in by_depth if d >= wanted]
            if deep:
                times[nodes] = by_depth[min(deep)]
        return times

    def nodes(self, batch: int, kv: int, depth: int | None = None) -> list[int]:
        """Return the calibrated nodes a request, ascending, from 1.

        Raises:
            CalibrationError: nothing is calibrated that far, or a number is below its range.
        """
        return sorted(self._times(batch, kv, depth))

    def cost(self, batch: int, nodes: float, kv: int, depth: int | None = None) -> float:
        """Return the time of a forward in microseconds.

        Args:
            batch: requests.
            nodes: nodes a request, on average over a ragged batch.
            kv: context length.
            depth: depth of the deepest tree; default the largest calibrated one.

        Raises:
            CalibrationError: nothing is calibrated that far, or a number is below its range.
        """
        times = self._times(batch, kv, depth)
        known = sorted(times)
        if not known[0] <= nodes <= known[-1]:
            raise CalibrationError(f"nodes: {nodes} is outside the calibrated {known[0]} to {known[-1]}")
        at = bisect_left(known, nodes)
        right = known[at]
        if right == nodes:
            return times[right]
        left = known[at - 1]
        share = (nodes - left) / (right - left)
        return times[left] * (1 - share) + times[right] * share


def _upward(what: str, value: int, known: Iterable[int]) -> int:
    known = list(known)
    above = [k for k in known if k >= value]
    if not above:
        raise CalibrationError(f"{what}: {value} is above the largest calibrated one, {max(known)}")
    return min(above)


def load_calibration(path: Path | str) -> CalibrationTable:
    """Read a calibration file.

    Raises:
        CalibrationError: it cannot be read, is too large, breaks the schema or has another version.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise CalibrationError(f"calibration {path}: {size} bytes are more than {MAX_FILE_BYTES}")
        data = path.read_bytes()
    except OSError as error:
        raise CalibrationError(f"calibration {path}: cannot be read: {error.strerror or error}") from error
    try:
        # First the version alone: another one may have other fields, which says nothing to the reader.
        version = msgspec.json.decode(data, type=_Version).schema_version
        if version != SCHEMA_VERSION:
            raise CalibrationError(
                f"calibration {path}: schema_version: {version} is not {SCHEMA_VERSION}; calibrate again"
            )
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CalibrationError(f"calibration {path}: {error}") from error
    try:
        return CalibrationTable(
            file.entries, name=file.name, device=file.device, date=file.date, label=file.label,
            torch_version=file.torch, protocol=file.protocol,
        )  # fmt: skip
    except CalibrationError as error:
        raise CalibrationError(f"calibration {path}: {error}") from error


def check_target(name: str, path: Path | str | None) -> Path | None:
    """Check, before hours of measurement, what would keep their table from being written.

    Raises:
        TypeError: ``name`` is no string, or ``path`` no path.
        ValueError: a name that no file may hold, or a path that no file can have or that is no regular file.
        OSError: the folder cannot be made or written.
    """
    try:
        msgspec.convert(name, Line).encode()
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        kind = ValueError if isinstance(name, str) else TypeError
        raise kind(
            f"name: {name!r} is not allowed; allowed: one line of up to 400 characters that UTF-8 can hold"
        ) from error
    if path is None:
        return None
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: expected a path, got {type(path).__name__}")
    path = Path(path)
    target = _target(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=_TEMPORARY):
        return path


def _target(path: Path) -> Path:
    """Return what is replaced or made when ``path`` is written: links are followed, to a regular file alone."""
    allowed = "allowed: a new file, a regular file, or a link to one"
    try:
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise ValueError(f"path: {path} is a link to nothing; {allowed}") from None
        return target
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            raise
        raise ValueError(f"path: {str(path)!r} is not allowed: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise ValueError(f"path: {path} is {what}; {allowed}")
    return target


def save_calibration(table: CalibrationTable, path: Path | str) -> None:
    """Write a calibration file: sorted, one timing a line, in one step (a reader sees the old file or the new one).

    Where ``path`` is a link, the file that it leads to is replaced.

    Raises:
        CalibrationError: the table holds what no file may.
        ValueError: ``path`` is something other than a regular file, leads to nothing, or no file can have it.
        OSError: the folder cannot be written.
    """
    path = Path(path)
    target = _target(path)
    head = {
        "schema_version": SCHEMA_VERSION, "label": table.label, "name": table.name, "device": table.device,
        "torch": table.torch_version, "date": table.date, "protocol": table.protocol,
    }  # fmt: skip
    rows = ",\n".join(f"    {json.dumps(msgspec.to_builtins(e))}" for e in table.entries)
    text = json.dumps(head, indent=2, ensure_ascii=False)[:-2] + f',\n  "entries": [\n{rows}\n  ]\n}}\n'
    try:
        data = text.encode()
        msgspec.json.decode(data, type=_File)  # what is written can be read
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise CalibrationError(f"calibration {path}: cannot be written: {error}") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=_TEMPORARY)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
