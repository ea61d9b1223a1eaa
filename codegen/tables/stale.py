"""Which entries were tuned for kernels that are no longer what is rendered today."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config
from bole_runtime.tables.load import CheckedEntry, LoadedTable
from bole_runtime.tables.words import counted


class Rendered(Protocol):
    """What staleness needs of a rendered kernel."""

    @property
    def name(self) -> str:
        """Function name."""

    @property
    def text_hash(self) -> str:
        """Hash of the comment-stripped text."""


#: Specialisation and configuration to kernels, as ``bole_codegen.render.render``.
Render = Callable[[Specialisation, Config], Sequence[Any]]


@dataclass(frozen=True)
class StaleEntry:
    """An entry and why it is stale."""

    key: str
    reason: str


def stale_entries(table: LoadedTable, render: Render | None = None) -> tuple[StaleEntry, ...]:
    """Return the entries of a table whose own kernels have changed, and those that no longer load.

    A change of another kernel, a comment or a date makes nothing stale.
    """
    if render is None:
        from bole_codegen.render import render as real

        render = real
    found = [StaleEntry(where, reason) for where, reason in table.skipped]
    for entry in table.entries:
        reason = _reason(entry, render)
        if reason is not None:
            found.append(StaleEntry(entry.key, reason))
    return tuple(found)


def _reason(entry: CheckedEntry, render: Render) -> str | None:
    try:
        now = [k.text_hash for k in render(entry.problem, entry.config)]
    except Exception as error:  # A template that fails for this entry is a reason, not the end of the report.
        return f"does not render: {type(error).__name__}: {error}"
    then = [k.text_hash for k in entry.entry.kernels]
    if now == then:
        return None
    if len(now) != len(then):
        return f"was tuned with {counted(len(then), 'kernel')}, has {len(now)} now"
    names = [k.name for k, a, b in zip(entry.entry.kernels, then, now, strict=True) if a != b]
    return f"the text of {', '.join(names)} changed"
