"""SGLang's scatter of accepted states into the pools of all layers, the other half of a round of its serial kernel."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from peers.base import PeerUnavailable
from peers.sglang_loader import TESTED_VERSION, _in_sys_modules, _stand_ins

SCATTER_FILE = "sglang/kernels/ops/mamba/mamba_state_scatter_triton.py"
ENTRY = "fused_mamba_state_scatter_with_mask"


def _unused(*arguments: object, **options: object) -> None:
    raise NotImplementedError("a part of SGLang that the scatter does not need")


def _modules() -> dict[str, ModuleType]:
    """Stand-ins for what the file imports of SGLang; the scatter itself calls neither."""
    modules = _stand_ins()
    for name, function in (
        ("sglang.kernels.ops.memory.ptr_table", "make_ptr_table"),
        ("sglang.srt.utils.common", "get_device_core_count"),
    ):
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            dotted = ".".join(parts[:depth])
            if dotted not in modules:
                modules[dotted] = ModuleType(dotted)
                modules[dotted].__path__ = []
        setattr(modules[name], function, _unused)
    return modules


def load_scatter(path: str | None, cache: Path) -> Callable[..., None]:
    """Return SGLang's scatter from a wheel, an unpacked wheel or site-packages.

    Args:
        path: the path, or None.
        cache: where a wheel's file is written, since Triton reads a kernel's source from a file.

    Raises:
        PeerUnavailable: no path, or another version's layout.
    """
    if not path:
        raise PeerUnavailable("no --sglang PATH given (a wheel, an unpacked wheel, or site-packages with sglang)")
    given = Path(path).expanduser()
    file = given / SCATTER_FILE
    if not file.is_file() and given.name == "sglang":
        file = given.parent / SCATTER_FILE
    if given.is_file():
        try:
            with zipfile.ZipFile(given) as archive:
                data = archive.read(SCATTER_FILE)
        except (zipfile.BadZipFile, KeyError, OSError) as error:
            raise PeerUnavailable(f"{given.name} holds no {SCATTER_FILE}: {error}") from error
        file = cache / SCATTER_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    if not file.is_file():
        raise PeerUnavailable(f"{given} holds no {SCATTER_FILE}; tested with sglang {TESTED_VERSION}")
    name = "bole_peer_sglang_scatter"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PeerUnavailable(f"cannot load {file}")
    module = importlib.util.module_from_spec(spec)
    with _in_sys_modules(_modules()):
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise PeerUnavailable(f"sglang's scatter does not load: {type(error).__name__}: {error}") from error
    entry = getattr(module, ENTRY, None)
    if entry is None:
        raise PeerUnavailable(f"{file} has no {ENTRY}; tested with {TESTED_VERSION}")
    return entry  # type: ignore[no-any-return]
