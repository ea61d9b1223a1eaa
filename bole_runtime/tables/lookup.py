"""From a problem to a configuration: exact GPU, then a declared alias, then the analytic default.

The order in which entries are tried, first match first:

1. tables of the exact GPU, a user's own (``BOLE_TUNED_DIR``) before the shipped ones where buckets are equal;
2. tables of the GPU that the record of this one names as a stand-in (same architecture);
3. shipped entries that were predicted without a GPU;
4. the analytic default, which needs no table.

Within a step, operation, family, ``dk``, ``dv``, element types and precision must be equal. Node and pending buckets
go to the nearest upward, in this order of weight. Then an equal gate mode goes before another, an equal ``HV / HK``
before another, the work bucket to the nearest upward, or the largest one below when none is above, and the depth
bucket to the nearest upward. Up to 8 nodes above up to 8 pending tokens, 16 rows, take entries of that bucket and then
those of 16 nodes without a chain. Of a convolution, operation, width, element types and whether every node has weights
of its own must be equal; after nodes and pending come an equal length of the state, bias and SiLU, the nearest number
of channels and the work bucket (``kinds.py``). An entry that cannot run here is passed over, so that the choice is only
ever about speed. So is one whose kernels failed on such a GPU before (``bad.py``), unless their text has changed
since; the analytic default respects that list too.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config, GpuLimits, Variant
from bole_runtime.tables.bad_lists import BadLists, KernelNames
from bole_runtime.tables.checks import CheckStore, minor
from bole_runtime.tables.command import gap_line
from bole_runtime.tables.kinds import kind_of, tune_command
from bole_runtime.tables.ranking import Tables
from bole_runtime.tables.sources import (
    analytic_default,
    declared_variants,
    explain_gpu,
    gpu_keys,
    installed_triton,
    kernel_names,
    own_root,
    own_root_fault,
    tuned_roots,
)

if TYPE_CHECKING:
    from bole_runtime.tables.load import CheckedEntry

#: device name -> (key, keys of the GPUs whose tables stand in), or None for an unknown device.
GpuLookup = Callable[[str], "tuple[str, tuple[str, ...]] | None"]


class TableWarning(UserWarning):
    """A choice fell back. Each kind warns once a process."""


@dataclass(frozen=True)
class Resolution:
    """A chosen configuration.

    Attributes:
        config: what to run.
        source: GPU key of the table, or ``default``.
        entry: the entry used, None for the analytic default.
        reason: one line for people: why this one.
    """

    config: Config
    source: str
    entry: CheckedEntry | None
    reason: str


class Dispatcher:
    """Chooses configurations and remembers them. Safe to share between threads; a repeated question is one dict hit.

    Args:
        roots: folders with tables, in order. The first is a user's own when ``user_roots`` is 1.
        user_roots: how many of ``roots`` come before the shipped ones.
        variants: op -> declared variants.
        gpus: device name -> GPU key and stand-ins.
        default: the analytic default.
        triton: version of the Triton installed.
        checks: record of entries checked here.
        kernels: names of the kernels that a choice would run: a list of bad kernels is of their text.
    """

    def __init__(
        self,
        roots: tuple[Path, ...] | None = None,
        *,
        user_roots: int | None = None,
        variants: Callable[[str], Iterable[Variant]] = declared_variants,
        gpus: GpuLookup = gpu_keys,
        default: Callable[[Specialisation, GpuLimits], Config] = analytic_default,
        triton: str | None = None,
        checks: CheckStore | None = None,
        kernels: KernelNames = kernel_names,
    ) -> None:
        self._from_environment = roots is None
        if roots is None:
            roots, user_roots = tuned_roots(), 0 if own_root() is None else 1
        self._variants = variants
        self._gpus = gpus
        self._default = default
        self._triton = installed_triton() if triton is None else triton
        self._checks = checks or CheckStore()
        self._lock = threading.RLock()
        self._memo: dict[tuple[Specialisation, str], Resolution] = {}
        self._warned: set[str] = set()
        self._tables = Tables(roots, user_roots or 0, variants, self._warn)
        self._bad = BadLists(roots, self._triton, self._warn, kernels)

    def resolve(self, problem: Specialisation, device_name: str, limits: GpuLimits) -> Resolution:
        """Return the configuration for ``problem`` on a device.

        Args:
            problem: buckets and element types; see :class:`Specialisation`.
            device_name: exact name, as torch reports it. Empty or ``cpu`` means no GPU: the analytic default.
            limits: what the device can hold.
        """
        found = self._memo.get((problem, device_name))
        if found is None:
            with self._lock:
                found = self._resolve(problem, device_name, limits)
                self._memo[problem, device_name] = found
        return found

    def unchecked(self, problem: Specialisation, device_name: str, limits: GpuLimits) -> tuple[CheckedEntry, ...]:
        """Return the entries that would be preferred to :meth:`resolve`'s answer once they are checked here.

        ``warmup`` runs the first against the reference and calls :meth:`mark_checked` when it agrees.
        """
        waiting = []
        for _, entry in self.ranked(problem, device_name):
            found = self._reject(problem, entry, device_name, limits)
            if found is None:
                break
            if found[0] == "unchecked":
                waiting.append(entry)
        return tuple(waiting)

    def note_stale(self, problem: Specialisation, resolution: Resolution, names: Sequence[str]) -> None:
        """Warn once when the kernels that a choice loads are not those that its entry was tuned with.

        Args:
            problem: what they are loaded for; an entry of another bucket has kernels of its own.
            resolution: of :meth:`resolve`.
            names: of the kernels that were loaded; a name holds the hash of its text.
        """
        entry = resolution.entry
        if entry is None or [k.name for k in entry.entry.kernels] == list(names):
            return
        if problem.for_text() != entry.problem.for_text():
            return
        self._warn(
            f"{kind_of(problem).name}stale",
            f"the entry {entry.key} of {entry.path} was tuned with other kernels than those of this release: its time "
            f"says little; run `{tune_command(entry.problem, entry.gpu_key)}` to tune again",
        )

    def is_trusted(self, entry: CheckedEntry, device_name: str = "") -> bool:
        """Return whether an entry may be used without a check: measured under this Triton minor, or checked here."""
        if entry.entry.label == "measured" and minor(entry.triton) == minor(self._triton):
            return True
        return self._checks.has(self._checks.digest(entry, device_name, self._triton))

    def mark_checked(self, entry: CheckedEntry, device_name: str = "") -> None:
        """Record that an entry agreed with the reference on this device, under this Triton."""
        with self._lock:
            self._checks.add(self._checks.digest(entry, device_name, self._triton))
            self._memo.clear()

    def clear(self) -> None:
        """Forget every table read and every choice made; the next question reads the files again."""
        with self._lock:
            self._memo.clear()
            self._tables.clear()
            self._bad.clear()

    def _resolve(self, problem: Specialisation, device_name: str, limits: GpuLimits) -> Resolution:
        fault = own_root_fault() if self._from_environment and "folder" not in self._warned else None
        if fault is not None:
            self._warn("folder", fault)
        gpu = self._gpus(device_name) if device_name not in ("", "cpu") else None
        key = gpu[0] if gpu else "NAME"
        fill = f"run `{tune_command(problem, key)}` to fill the gap"
        of, waiting = kind_of(problem).name, 0
        for source, entry in self.ranked(problem, device_name):
            found = self._reject(problem, entry, device_name, limits)
            if found is not None:
                kind, why = found
                waiting += kind == "unchecked"
                self._warn(f"{of}{kind}", f"the entry {entry.key} of {entry.path} {why}; {fill}")
                continue
            self._warn_about(problem, entry, source, key, fill)
            return Resolution(entry.config, source, entry, f"entry {entry.key} of {entry.path}")
        if device_name in ("", "cpu"):
            return Resolution(self._default(problem, limits), "default", None, "no GPU: analytic default")
        config = self._good_default(problem, key if gpu else "", limits)
        if gpu is None:
            text = explain_gpu(device_name)
            self._warn("gpu", text)
        else:
            text = gap_line(problem, key, waiting)
            self._warn(f"{of}waiting" if waiting else f"{of}default", text if waiting else f"{text}; {fill}")
        return Resolution(config, "default", None, text)

    def reject(self, problem: Specialisation, entry: CheckedEntry, device_name: str, limits: GpuLimits) -> str | None:
        """Return why an entry is not taken for a problem on a device, None when it may be."""
        found = self._reject(problem, entry, device_name, limits)
        return None if found is None else found[1]

    def _reject(
        self, problem: Specialisation, entry: CheckedEntry, device_name: str, limits: GpuLimits
    ) -> tuple[str, str] | None:
        """Return the kind of warning and the reason why an entry is not taken, None when it may be."""
        reason = self._reason(problem, entry, limits)
        if reason is not None:
            return "unrunnable", f"cannot run here ({reason})"
        gpu = self._gpus(device_name)
        names = tuple(k.name for k in entry.entry.kernels)
        bad = self._bad.find(problem, entry.config, gpu[0] if gpu else "", names)
        if bad is not None:
            return "bad", f"is on the list of kernels that failed here ({bad})"
        if not self.is_trusted(entry, device_name):
            why = (
                "was predicted without a GPU"
                if entry.entry.label == "predicted"
                else f"was written under Triton {entry.triton or 'unknown'}, this is {self._triton or 'unknown'}"
            )
            return "unchecked", f"{why}; it is used once warmup() has checked it here"
        return None

    def _good_default(self, problem: Specialisation, key: str, limits: GpuLimits) -> Config:
        """Return the analytic default, or that of another variant where it is known to fail on this GPU."""
        config = self._default(problem, limits)
        bad = self._bad.find(problem, config, key)
        if bad is None:
            return config
        for variant in self._variants(problem.op):
            if variant.applies(problem) is None:
                other = variant.default(problem, limits)
                if variant.check(problem, other, limits) is None and self._bad.find(problem, other, key) is None:
                    self._warn("bad", f"the default {config} is known to fail on {key} ({bad}); {other} is used")
                    return other
        self._warn("bad", f"the default {config} is known to fail on {key} ({bad}), and so are the others")
        return config

    def _warn_about(self, problem: Specialisation, entry: CheckedEntry, source: str, key: str, fill: str) -> None:
        of = kind_of(problem)
        if source != key:
            text = f"no table of {key} serves {problem.key()}; the one of {source} stands in"
            self._warn(f"{of.name}alias", f"{text}; {fill}")
        for kind, text in of.notes(problem, entry.problem):
            self._warn(f"{of.name}{kind}", f"{text}; {fill}")

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"bole: {text}", TableWarning, stacklevel=5)

    def ranked(self, problem: Specialisation, device_name: str) -> Iterator[tuple[str, CheckedEntry]]:
        """Yield (GPU key, entry) in the order of the module's docstring, whether or not an entry can run here."""
        gpu = self._gpus(device_name) if device_name not in ("", "cpu") else None
        if gpu is not None:
            yield from self._tables.ranked(problem, (gpu[0], *gpu[1]))

    def _reason(self, problem: Specialisation, entry: CheckedEntry, limits: GpuLimits) -> str | None:
        for variant in self._variants(problem.op):
            if variant.name == entry.config.variant:
                return variant.reason(problem, entry.config, limits)
        return f"no variant {entry.config.variant!r}"


_shared: Dispatcher | None = None
_shared_lock = threading.Lock()


def dispatcher() -> Dispatcher:
    """Return the dispatcher of this process, made on the first call."""
    global _shared
    if _shared is None:
        with _shared_lock:
            if _shared is None:
                _shared = Dispatcher()
    return _shared


__all__ = ["Dispatcher", "GpuLookup", "Resolution", "TableWarning", "dispatcher", "own_root_fault", "tuned_roots"]
