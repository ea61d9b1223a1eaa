"""Load one kernel file of SGLang without importing SGLang.

The package's ``__init__`` files pull in a serving engine. The kernel file itself needs five small predicates about
the device, which stand-in modules answer while it is executed; nothing of SGLang is copied into this repository.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from peers.base import PeerUnavailable

KERNEL_FILE = "sglang/kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py"
ENTRY = "fused_sigmoid_gating_delta_rule_update"
TESTED_VERSION = "0.5.23"
SOURCE_NOTE = "SOURCE.json"
#: What other peers read; packed where it is there.
OTHER_FILES = tuple(
    f"sglang/kernels/ops/{name}"
    for name in (
        "attention/linear/gdn_replayssm_spec_decode.py",
        "attention/linear/gdn_replayssm_spec_fold.py",
        "mamba/causal_conv1d_triton.py",
        "mamba/mamba_state_scatter_triton.py",
        "mamba/triton_ops/mamba_ssm.py",
    )
)


@dataclass(frozen=True)
class SglangSource:
    """The kernel file and where it came from."""

    path: Path
    version: str
    sha256: str

    @property
    def label(self) -> str:
        """Version and the start of the hash, for reports."""
        return f"{self.version} ({self.sha256[:12]})"


def _version_of(names: list[str], read: Callable[[str], bytes]) -> str:
    for name in names:
        if re.fullmatch(r"sglang-[^/]+\.dist-info/METADATA", name):
            match = re.search(rb"^Version: *(\S+)", read(name), re.MULTILINE)
            if match:
                return match.group(1).decode()
    return "unknown"


def read_wheel(wheel: Path) -> tuple[bytes, str]:
    """Return the kernel file's bytes and the version from a wheel.

    Raises:
        PeerUnavailable: not a wheel, or one without the file.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            if KERNEL_FILE not in names:
                raise PeerUnavailable(f"{wheel.name} holds no {KERNEL_FILE}; tested with sglang {TESTED_VERSION}")
            return archive.read(KERNEL_FILE), _version_of(names, archive.read)
    except (zipfile.BadZipFile, OSError) as error:
        raise PeerUnavailable(f"cannot read {wheel} as a wheel: {error}") from error


def read_directory(root: Path) -> tuple[bytes, str]:
    """Return the kernel file's bytes and the version from a site-packages folder, an unpacked wheel or a packed folder.

    ``root`` may also be the ``sglang`` folder itself.

    Raises:
        PeerUnavailable: the folder does not hold the file.
    """
    if not (root / KERNEL_FILE).is_file() and root.name == "sglang" and (root.parent / KERNEL_FILE).is_file():
        root = root.parent
    if not (root / KERNEL_FILE).is_file():
        raise PeerUnavailable(f"{root} holds no {KERNEL_FILE}; tested with sglang {TESTED_VERSION}")
    note = root / SOURCE_NOTE
    if note.is_file():
        version = str(json.loads(note.read_text()).get("version", "unknown"))
    else:
        names = [f"{p.name}/METADATA" for p in root.glob("sglang-*.dist-info") if (p / "METADATA").is_file()]
        version = _version_of(names, lambda name: (root / name).read_bytes())
    return (root / KERNEL_FILE).read_bytes(), version


def pack(source: Path, out: Path) -> SglangSource:
    """Copy what the benchmarks need from a wheel or folder into ``out``, with a note of its origin."""
    data, version = read_wheel(source) if source.is_file() else read_directory(source)
    for name in OTHER_FILES:
        # A release without one of them still has the serial kernel.
        with suppress(PeerUnavailable):
            file = find_file(str(source), name, out)
            if file != out / name:
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (out / name).write_bytes(file.read_bytes())
    target = out / KERNEL_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    note = {"project": "sglang", "version": version, "file": KERNEL_FILE, "sha256": digest, "from": source.name}
    (out / SOURCE_NOTE).write_text(json.dumps(note, indent=2, sort_keys=True) + "\n")
    return SglangSource(target, version, digest)


def locate(path: str | None, cache: Path) -> SglangSource:
    """Find the kernel file at a path given by the user: a wheel, an unpacked one, site-packages or a packed folder.

    Args:
        path: the path, or None.
        cache: where a wheel's file is written, since Triton reads a kernel's source from a file.

    Raises:
        PeerUnavailable: no path, nothing there, or another version's layout.
    """
    if not path:
        raise PeerUnavailable("no --sglang PATH given (a wheel, an unpacked wheel, or site-packages with sglang)")
    given = Path(path).expanduser()
    if given.is_file():
        return pack(given, cache)
    if not given.is_dir():
        raise PeerUnavailable(f"--sglang {given}: no such file or folder")
    data, version = read_directory(given)
    base = given if (given / KERNEL_FILE).is_file() else given.parent
    return SglangSource(base / KERNEL_FILE, version, hashlib.sha256(data).hexdigest())


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def _cuda_version() -> tuple[int, ...]:
    return tuple(int(x) for x in (torch.version.cuda or "0.0").split(".")[:2])


def _is_cuda() -> bool:
    return torch.cuda.is_available() and torch.version.cuda is not None


def stand_ins() -> dict[str, ModuleType]:
    """Modules that answer what the kernel file asks about the device, as SGLang's own predicates define it."""
    answers: dict[str, dict[str, Callable[[], object]]] = {
        "sglang.kernels.jit.utils": {
            "is_arch_support_pdl": lambda: torch.version.hip is None and _capability()[0] >= 9,
        },
        "sglang.srt.utils": {
            "is_cuda": _is_cuda,
            "is_hip": lambda: torch.version.hip is not None,
            "is_gfx95_supported": lambda: False,
            "is_sm90_supported": lambda: _is_cuda() and _capability()[0] == 9 and _cuda_version() >= (12, 3),
            "get_device_sm": lambda: _capability()[0] * 10 + _capability()[1],
        },
    }
    modules: dict[str, ModuleType] = {}
    for name, functions in answers.items():
        packages(modules, name)
        for function, answer in functions.items():
            setattr(modules[name], function, answer)
    return modules


def packages(modules: dict[str, ModuleType], name: str) -> ModuleType:
    """Add a stand-in for a dotted name and everything above it, where there is none, and return that of the name."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        dotted = ".".join(parts[:depth])
        if dotted not in modules:
            modules[dotted] = ModuleType(dotted)
            # An empty path makes any other import below it fail by name instead of finding an installed sglang.
            modules[dotted].__path__ = []
    return modules[name]


@contextmanager
def _in_sys_modules(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Put modules in place of an installed sglang, and put that back afterwards."""
    hidden = {n: m for n, m in sys.modules.items() if n == "sglang" or n.startswith("sglang.")}
    for name in hidden:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in [n for n in sys.modules if n == "sglang" or n.startswith("sglang.")]:
            del sys.modules[name]
        sys.modules.update(hidden)


def find_file(path: str | None, relative: str, cache: Path) -> Path:
    """Return a file of SGLang, from a wheel, an unpacked wheel or site-packages.

    Args:
        path: the path, or None.
        relative: the file inside the package's root.
        cache: where a wheel's file is written, since Triton reads a kernel's source from a file.

    Raises:
        PeerUnavailable: no path, or another version's layout.
    """
    if not path:
        raise PeerUnavailable("no --sglang PATH given (a wheel, an unpacked wheel, or site-packages with sglang)")
    given = Path(path).expanduser()
    file = given / relative
    if not file.is_file() and given.name == "sglang":
        file = given.parent / relative
    if given.is_file():
        try:
            with zipfile.ZipFile(given) as archive:
                data = archive.read(relative)
        except (zipfile.BadZipFile, KeyError, OSError) as error:
            raise PeerUnavailable(f"{given.name} holds no {relative}: {error}") from error
        file = cache / relative
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    if not file.is_file():
        raise PeerUnavailable(f"{given} holds no {relative}; tested with sglang {TESTED_VERSION}")
    return file


def execute(
    file: Path,
    entry: str,
    label: str,
    modules: dict[str, ModuleType] | None = None,
    project: str = "sglang",
) -> Callable[..., Any]:
    """Execute a kernel file of SGLang, or of a project built on it, and return its entry function.

    Args:
        file: the file.
        entry: name of the function.
        label: what the file is, for messages.
        modules: stand-ins for what it imports of SGLang; default, those of :func:`stand_ins`.
        project: whose file it is, for messages.

    Raises:
        PeerUnavailable: the file does not load here; the message holds the cause.
    """
    # Triton looks its functions' globals up through the module, so it stays registered under a name of our own.
    name = f"bole_peer_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PeerUnavailable(f"cannot load {file}")
    module = importlib.util.module_from_spec(spec)
    with _in_sys_modules(stand_ins() if modules is None else modules):
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise PeerUnavailable(f"{project} {label} does not load: {type(error).__name__}: {error}") from error
    found = getattr(module, entry, None)
    if found is None:
        tested = f"; tested with {TESTED_VERSION}" if project == "sglang" else ""
        raise PeerUnavailable(f"{project} {label} has no {entry}{tested}")
    return found  # type: ignore[no-any-return]


def load_entry(source: SglangSource) -> Callable[..., torch.Tensor]:
    """Execute the file of the serial kernel and return its entry function.

    Raises:
        PeerUnavailable: the file does not load here; the message holds the cause.
    """
    return execute(Path(source.path), ENTRY, source.label)
