"""Other projects' kernels where there is no GPU: numbers in the interpreter, and compilation for an H200."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parents[3] / "tools"

#: What a child process does first. The interpreter's scalars are one-element arrays, which newer NumPy does not turn
#: into loop bounds: functions that loop over some get ``counted`` for their ``range``.
PREPARE = """
import builtins, contextlib, sys
sys.path.insert(0, {tools!r})
import torch

torch.cpu.device = lambda index: contextlib.nullcontext()

def counted(*bounds):
    return builtins.range(*(b if isinstance(b, int) else int(b.handle.data.item()) for b in bounds))
"""


def interpreted(code: str, **paths: str) -> str:
    """Run code in a child under Triton's interpreter and return what it printed.

    Args:
        code: after :data:`PREPARE`; a name in braces is replaced by its path.
        paths: by name.

    Raises:
        AssertionError: the child failed.
    """
    text = PREPARE.format(tools=str(TOOLS)) + code
    for name, path in paths.items():
        text = text.replace("{" + name + "!r}", repr(path))
    child = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return child.stdout


@contextmanager
def compiled_only(capability: tuple[int, int] = (9, 0)) -> Iterator[list[tuple[str, Any]]]:
    """Compile the kernels that are launched meanwhile, for a GPU that need not be there, instead of launching them.

    Yields:
        Name and compiled kernel, one entry a launch.
    """
    from triton.runtime.jit import JITFunction

    from bole_codegen.compile.offline import targeting

    made: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        made.append((self.__name__, kernel))
        return kernel

    JITFunction.run = compile_instead
    try:
        with targeting(capability):
            yield made
    finally:
        JITFunction.run = run
