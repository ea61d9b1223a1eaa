"""``bole-tune --diff OLD NEW``: what changed from one table to another, for a reviewer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bole_runtime.tables.load import load_file
from bole_runtime.tables.schema import AnyEntry, launch_of
from bole_runtime.tables.words import entries

#: Times closer than this, as a fraction, did not change.
SAME = 0.02


@dataclass(frozen=True)
class Change:
    """One key of two tables.

    Attributes:
        key: of the entry.
        kind: ``added``, ``removed``, ``faster``, ``slower``, ``choice`` (another configuration, equal time),
            ``label`` (measured and predicted times do not compare), ``launch`` (nor do those of other heads, requests
            or trees) or ``same``.
        old: entry before, None when added.
        new: entry after, None when removed.
    """

    key: str
    kind: str
    old: AnyEntry | None
    new: AnyEntry | None

    @property
    def ratio(self) -> float | None:
        """New time over old time, None where they do not compare."""
        if self.old is None or self.new is None or self.kind in ("label", "launch"):
            return None
        return self.new.median_us / self.old.median_us if self.old.median_us else None


def read_entries(path: Path) -> dict[str, AnyEntry]:
    """Return the entries of a table file, or of every table in a folder and its subfolders, by GPU and key.

    Raises:
        TableError: a file is not a table.
        OSError: there is nothing there.
    """
    paths = [path] if path.is_file() else sorted(p for p in path.glob("**/*.json") if p.parent.name != "known-bad")
    if not paths:
        raise FileNotFoundError(f"no table at {path}")
    found: dict[str, AnyEntry] = {}
    for one in paths:
        table = load_file(one)
        for entry in table.entries:
            found[f"{table.gpu.key} {entry.key()}"] = entry
    return found


def diff_entries(old: dict[str, AnyEntry], new: dict[str, AnyEntry]) -> list[Change]:
    """Return every key of either, in order."""
    changes = []
    for key in sorted(old.keys() | new.keys()):
        changes.append(Change(key, _kind(old.get(key), new.get(key)), old.get(key), new.get(key)))
    return changes


def _kind(old: AnyEntry | None, new: AnyEntry | None) -> str:
    if old is None:
        return "added"
    if new is None:
        return "removed"
    if old.label != new.label:
        return "label"
    if _other_launch(old, new):
        return "launch"
    ratio = new.median_us / max(old.median_us, 1e-9)
    if ratio < 1 - SAME:
        return "faster"
    if ratio > 1 + SAME:
        return "slower"
    return "same" if (old.variant, old.params) == (new.variant, new.params) else "choice"


def _other_launch(old: AnyEntry, new: AnyEntry) -> bool:
    """Whether two entries of a bucket were timed with different launches, as far as they say."""
    launches = launch_of(old), launch_of(new)
    return None not in launches and launches[0] != launches[1]


def describe_changes(changes: Sequence[Change]) -> str:
    """Return what changed as text: a line a key that is not the same, and a summary."""
    lines = []
    for change in changes:
        if change.kind == "same":
            continue
        times = " -> ".join("-" if e is None else f"{e.median_us:.2f} us" for e in (change.old, change.new))
        by = f" ({change.ratio:.2f}x)" if change.ratio is not None else ""
        lines.append(f"{change.kind:8} {change.key}: {times}{by}{_choice(change)}")
    counts: dict[str, int] = {}
    for change in changes:
        counts[change.kind] = counts.get(change.kind, 0) + 1
    kinds = ("added", "removed", "faster", "slower", "choice", "label", "launch", "same")
    summary = ", ".join(f"{counts[k]} {k}" for k in kinds if k in counts)
    return "\n".join([*lines, f"{entries(len(changes))}: {summary}" if changes else "no entries"])


def _choice(change: Change) -> str:
    old, new = change.old, change.new
    if old is None or new is None:
        return ""
    if old.variant != new.variant:
        return f"; {old.variant} -> {new.variant}"
    parts = [f"{n} {old.params.get(n)} -> {v}" for n, v in new.params.items() if old.params.get(n) != v]
    return f"; {new.variant}: {', '.join(parts)}" if parts else ""


def changes_json(changes: Sequence[Change]) -> list[dict[str, object]]:
    """Return the changes as plain data."""
    return [
        {
            "key": c.key,
            "kind": c.kind,
            "old_us": None if c.old is None else c.old.median_us,
            "new_us": None if c.new is None else c.new.median_us,
            "old": None if c.old is None else {"variant": c.old.variant, "params": dict(c.old.params)},
            "new": None if c.new is None else {"variant": c.new.variant, "params": dict(c.new.params)},
        }
        for c in changes
    ]
