"""Kernels that failed on a GPU under a Triton version: ``<root>/<gpu>/known-bad/triton-<version>.json``.

The search writes these lists; the analytic default and the tables are checked against them, so that nothing known to
crash or to give wrong numbers is chosen. Data only, like tables.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from bole_runtime.kernels.conv_problem import CONV_OPS
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config
from bole_runtime.tables.kinds import CONVOLUTION, RECURRENCE, class_of, kind_of
from bole_runtime.tables.schema import MAX_FILE_BYTES, DType, Hash, Line, Param, ParamValue, Word

BAD_VERSION = 1
_VERSION = re.compile(r"\A[0-9A-Za-z.+_-]{1,64}\Z")
_GPU = re.compile(r"\A[a-z0-9][a-z0-9-]{0,63}\Z")
Small = Annotated[int, Meta(ge=0, le=4096)]


class BadEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One configuration that failed for all buckets of a class (``work`` and ``depth`` do not change its kernels).

    Attributes:
        kernels: text hashes; a kernel whose text has changed since is not known to be bad.
        kind: of failure, as the search names them.
        message: what was seen.
        date: day.
    """

    op: Literal["verify", "commit"]
    family: Word
    dk: Small
    dv: Small
    group: Small
    in_dtype: DType
    state_dtype: DType
    gate_mode: Word
    precision: Literal["fast", "lossless"]
    nodes: Small
    pending: Small
    variant: Word
    params: Annotated[dict[Param, ParamValue], Meta(max_length=32)]
    kernels: Annotated[list[Hash], Meta(max_length=16)]
    kind: Word
    message: Line
    date: Annotated[str, Meta(pattern=r"\A\d{4}-\d{2}-\d{2}\Z")]

    def place(self) -> tuple[object, ...]:
        """Return what the entry is stored under."""
        return _place(self, RECURRENCE.class_fields)


class BadConvEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One configuration of a convolution that failed: its kernels serve any number of channels, nodes and requests.

    Attributes:
        pending: 1 for kernels that read a pending chain, else 0.

    The others are those of :class:`BadEntry`.
    """

    op: Literal["tree_conv", "conv_commit"]
    width: Small
    length: Small
    in_dtype: DType
    state_dtype: DType
    bias: bool
    silu: bool
    dynamic: bool
    pending: Small
    variant: Word
    params: Annotated[dict[Param, ParamValue], Meta(max_length=32)]
    kernels: Annotated[list[Hash], Meta(max_length=16)]
    kind: Word
    message: Line
    date: Annotated[str, Meta(pattern=r"\A\d{4}-\d{2}-\d{2}\Z")]

    def place(self) -> tuple[object, ...]:
        """Return what the entry is stored under."""
        return _place(self, CONVOLUTION.class_fields)


AnyBad = BadEntry | BadConvEntry


def _place(entry: AnyBad, fields: tuple[str, ...]) -> tuple[object, ...]:
    return (*(getattr(entry, f) for f in fields), entry.variant, tuple(sorted(entry.params.items())))


def new_bad(problem: Specialisation, **values: Any) -> AnyBad:
    """Return the entry of a problem whose kernels failed, with values beside the class."""
    kind = BadConvEntry if problem.op in CONV_OPS else BadEntry
    shaping: dict[str, Any] = dict(zip(kind_of(problem).class_fields, class_of(problem), strict=True))
    return kind(**shaping, **values)


class BadFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One list."""

    schema_version: Annotated[int, Meta(ge=1, le=1_000_000)]
    gpu: Annotated[str, Meta(pattern=r"\A[a-z0-9][a-z0-9-]{0,63}\Z")]
    triton: Annotated[str, Meta(pattern=r"\A[0-9A-Za-z.+_-]{1,64}\Z")]
    entries: list[AnyBad]


class _RawFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    schema_version: Annotated[int, Meta(ge=1, le=1_000_000)]
    gpu: Annotated[str, Meta(pattern=r"\A[a-z0-9][a-z0-9-]{0,63}\Z")]
    triton: Annotated[str, Meta(pattern=r"\A[0-9A-Za-z.+_-]{1,64}\Z")]
    entries: Annotated[list[msgspec.Raw], Meta(max_length=20_000)]


class _VersionOnly(msgspec.Struct, frozen=True):
    """Read first: another version has other fields as well."""

    schema_version: int


class _Op(msgspec.Struct, frozen=True):
    op: str = ""


def _decode(data: bytes) -> BadFile:
    raw = msgspec.json.decode(data, type=_RawFile)
    entries: list[AnyBad] = []
    for one in raw.entries:
        conv = msgspec.json.decode(one, type=_Op).op in CONV_OPS
        entries.append(msgspec.json.decode(one, type=BadConvEntry if conv else BadEntry))
    return BadFile(schema_version=raw.schema_version, gpu=raw.gpu, triton=raw.triton, entries=entries)


def bad_path(root: Path, gpu_key: str, triton: str) -> Path:
    """Return the list of a GPU under a Triton version.

    Raises:
        ValueError: a name would leave the folder.
    """
    if not _GPU.match(gpu_key) or not _VERSION.match(triton) or ".." in triton:
        raise ValueError(f"GPU {gpu_key!r} or Triton version {triton!r} is no plain name")
    return root / gpu_key / "known-bad" / f"triton-{triton}.json"


def load_bad(path: Path) -> BadFile | None:
    """Read a list; None when there is none or it is of another version.

    Raises:
        ValueError: it cannot be read or breaks the schema; names it.
    """
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise ValueError(f"known-bad list {path} is {'a folder' if stat.S_ISDIR(info.st_mode) else 'no file'}")
        if info.st_size > MAX_FILE_BYTES:
            raise ValueError(f"known-bad list {path} is larger than {MAX_FILE_BYTES} bytes")
        data = path.read_bytes()
        if msgspec.json.decode(data, type=_VersionOnly).schema_version != BAD_VERSION:
            return None
        return _decode(data)
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise ValueError(f"known-bad list {path} is a link to nothing") from None
        return None
    except OSError as error:
        raise ValueError(f"known-bad list {path} cannot be read: {error.strerror or error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"known-bad list {path}: {error}") from error


def place_of(problem: Specialisation, config: Config) -> tuple[object, ...]:
    """Return what a configuration is stored under."""
    return (*class_of(problem), config.variant, tuple(sorted(config.as_dict().items())))


def find_bad(
    entries: Iterable[AnyBad], problem: Specialisation, config: Config, names: Callable[[], Sequence[str] | None]
) -> AnyBad | None:
    """Return the entry of a configuration, None when it is not known to be bad.

    Args:
        entries: of lists.
        problem: what it is to serve.
        config: the configuration.
        names: gives the names of the kernels that it would run, which say their text; None when nobody can tell, and
            an entry for any text counts then. Asked only when there is an entry, since they may have to be rendered.
    """
    wanted = place_of(problem, config)
    here = [e for e in entries if e.place() == wanted]
    if not here:
        return None
    found = names()
    return next((e for e in here if found is None or _is_text_of(e, found)), None)


def _is_text_of(entry: AnyBad, names: Sequence[str]) -> bool:
    """Return whether kernels of these names are those that failed: a name ends in the first digits of a hash."""
    if not entry.kernels:  # Nothing is said of their text.
        return True
    ends = [name.rpartition("_")[2] for name in names]
    return len(ends) == len(entry.kernels) and all(
        e and h.startswith(e) for h, e in zip(entry.kernels, ends, strict=True)
    )
