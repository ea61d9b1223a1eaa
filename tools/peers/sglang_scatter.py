"""SGLang's scatter of accepted states into the pools of all layers, the other half of a round of its serial kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from peers.sglang_loader import execute, find_file, packages, stand_ins

SCATTER_FILE = "sglang/kernels/ops/mamba/mamba_state_scatter_triton.py"
ENTRY = "fused_mamba_state_scatter_with_mask"


def _unused(*arguments: object, **options: object) -> None:
    raise NotImplementedError("a part of SGLang that the scatter does not need")


def _modules() -> dict[str, ModuleType]:
    """Stand-ins for what the file imports of SGLang; the scatter itself calls neither."""
    modules = stand_ins()
    for name, function in (
        ("sglang.kernels.ops.memory.ptr_table", "make_ptr_table"),
        ("sglang.srt.utils.common", "get_device_core_count"),
    ):
        setattr(packages(modules, name), function, _unused)
    return modules


def load_scatter(path: str | None, cache: Path) -> Callable[..., None]:
    """Return SGLang's scatter from a wheel, an unpacked wheel or site-packages.

    Args:
        path: the path, or None.
        cache: where a wheel's file is written, since Triton reads a kernel's source from a file.

    Raises:
        PeerUnavailable: no path, or another version's layout.
    """
    return execute(find_file(path, SCATTER_FILE, cache), ENTRY, "scatter", _modules())
