"""The lists of known-bad kernels as the dispatcher sees them. Light to import: a list is read when there is one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config

if TYPE_CHECKING:
    from bole_runtime.tables.bad import AnyBad

#: Problem, configuration and kernels that an entry names -> kernels that would run, None when nobody can tell.
KernelNames = Callable[[Specialisation, Config, "tuple[str, ...]"], "tuple[str, ...] | None"]


class BadLists:
    """Known-bad configurations of GPUs under one Triton version.

    Args:
        roots: folders with tables.
        triton: version.
        warn: told the kind and the text when a list cannot be read.
        kernels: problem, configuration and the kernels that an entry names to those that would run; see
            :func:`~bole_runtime.tables.sources.kernel_names`.
    """

    def __init__(
        self, roots: Sequence[Path], triton: str, warn: Callable[[str, str], None], kernels: KernelNames
    ) -> None:
        self._roots = roots
        self._triton = triton
        self._warn = warn
        self._kernels = kernels
        self._read: dict[str, tuple[AnyBad, ...]] = {}

    def find(self, problem: Specialisation, config: Config, gpu_key: str, names: tuple[str, ...] = ()) -> str | None:
        """Return the kind of failure of a configuration on a GPU, None when it is not known to fail.

        A kernel whose text has changed since it failed is another one, and not known to fail.

        Args:
            problem: what it is to serve.
            config: the configuration.
            gpu_key: of the GPU.
            names: of the kernels that a table's entry names.
        """
        if not gpu_key or not self._triton:
            return None
        if gpu_key not in self._read:
            self._read[gpu_key] = self._load(gpu_key)
        entries = self._read[gpu_key]
        if not entries:
            return None
        from bole_runtime.tables.bad import find_bad

        found = find_bad(entries, problem, config, lambda: self._kernels(problem, config, names))
        return None if found is None else found.kind

    def clear(self) -> None:
        """Forget every list."""
        self._read.clear()

    def _load(self, gpu_key: str) -> tuple[AnyBad, ...]:
        found: list[AnyBad] = []
        for root in self._roots:
            if os.path.isdir(root / gpu_key / "known-bad"):
                from bole_runtime.tables.bad import bad_path, load_bad

                try:
                    file = load_bad(bad_path(root, gpu_key, self._triton))
                except ValueError as error:
                    self._warn(f"bad {root}", f"{error}; it is not used")
                    continue
                found += file.entries if file is not None else ()
        return tuple(found)
