"""One row a point: what was measured, and how it is shown."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verify_bench.grid import Point, reference_deviation, verdict

#: Fields of a result that become columns of the CSV file.
FLAT = (
    "us", "spread_us", "error", "error_fp32", "status", "variant", "workspace_bytes", "host_us", "first_call_s",
    "includes", "launches", "floor_us",
)  # fmt: skip


@dataclass
class Result:
    """One candidate at one point. ``us`` is None unless its output was right.

    Attributes:
        profile: ``fast`` or ``lossless``.
        status: ``ok``, or why there is no time: wrong, failed, does not fit, not asked.
        us: median microseconds a layer.
        spread_us: interquartile range.
        error: relative error of the timed output against fp64.
        error_fp32: relative error with an fp32 output, free of the output's own rounding.
        variant: what ran.
        workspace_bytes: scratch.
        first_call_s: seconds of the first call, compilation included.
        host_us: host microseconds of one eager call, where asked for.
        stages: kernel name to microseconds a layer, where asked for.
        includes: what one timed call does, where that is more or less than Bole's verify.
        launches: kernels that one call of a layer enqueues, of a peer.
        floor_us: memory floor of what a peer's call does, at the copy bandwidth of this run.
        commits: whether a call also commits the round before it.
    """

    profile: str
    status: str = "ok"
    us: float | None = None
    spread_us: float | None = None
    error: float | None = None
    error_fp32: float | None = None
    variant: str = ""
    workspace_bytes: int = 0
    first_call_s: float | None = None
    host_us: float | None = None
    stages: dict[str, float] = field(default_factory=dict)
    includes: str = ""
    launches: int | None = None
    floor_us: float | None = None
    commits: bool = False


@dataclass
class Row:
    """A point with all its results.

    Attributes:
        point: what was measured.
        depth: depth of the trees drawn.
        layers: layers in the graph.
        cold: whether their states exceed three times L2.
        floor_us: memory floor of verify at the copy bandwidth of this run.
        results: candidate name to result, Bole first.
        peers: names of the results that are peers, in the order asked for.
        build_us: one TreeBatch rebuild, shared by all layers of a round.
        commit: profile to result of the commit of all layers, microseconds a layer.
        commit_floor_us: read and write floor of the commit.
        note: why a row is missing or limited.
    """

    point: Point
    depth: int = 0
    layers: int = 0
    cold: bool = False
    floor_us: float | None = None
    results: dict[str, Result] = field(default_factory=dict)
    peers: list[str] = field(default_factory=list)
    build_us: float | None = None
    commit: dict[str, Result] = field(default_factory=dict)
    commit_floor_us: float | None = None
    note: str = ""

    def best(self, profile: str) -> Result | None:
        """Return the dispatched result of a profile; where only pinned ones ran, the fastest."""
        if profile in self.results:
            return self.results[profile]
        pinned = [r for n, r in self.results.items() if r.profile == profile and n not in self.peers]
        timed = [r for r in pinned if r.us is not None]
        return min(timed, key=lambda r: r.us or 0.0) if timed else (pinned[0] if pinned else None)

    @property
    def serial(self) -> Result | None:
        """Result of the first peer asked for, the one ratios are over."""
        return self.results.get(self.peers[0]) if self.peers else None

    def ratio(self, profile: str) -> float | None:
        """Return how many times faster than the first peer at the same work, or None."""
        peer = self.serial
        return None if peer is None else self._over(peer, profile)

    def peer_ratio(self, name: str) -> float | None:
        """Return how many times faster Bole's profile is than a peer at the same work and precision, or None."""
        peer = self.results[name]
        return self._over(peer, peer.profile)

    def _over(self, peer: Result, profile: str) -> float | None:
        """Return a ratio of times; the like of a peer whose call commits as well is a verify and a commit."""
        mine, fold = self.best(profile), self.commit.get(profile)
        if mine is None or not mine.us or not peer.us:
            return None
        if not peer.commits:
            return peer.us / mine.us
        return None if fold is None or not fold.us else peer.us / (mine.us + fold.us)

    def over_floor(self, profile: str) -> float | None:
        """Return the time over the memory floor, or None."""
        mine = self.best(profile)
        return None if mine is None or mine.us is None or not self.floor_us else mine.us / self.floor_us

    def verdict(self, profile: str) -> str:
        """Return the judgement against the target, or an empty string."""
        if self.best(profile) is None:
            return ""
        serial = self.serial
        deviation = reference_deviation(self.point, serial.us if serial else None)
        return verdict(self.point, profile, self.ratio(profile), deviation)

    def round_us(self, profile: str) -> float | None:
        """Return verify + commit + a layer's share of the tree build: the sum of the parts, not a measurement.

        A peer that commits by a call of its own has a round as well, under its name; only chains have such peers, and
        a chain has no tree to build.
        """
        mine, fold = self.best(profile), self.commit.get(profile)
        if mine is None or fold is None or mine.us is None or fold.us is None:
            return None
        return mine.us + fold.us + (0.0 if profile in self.peers else self.build_us or 0.0) / max(1, self.layers)

    def flat(self) -> dict[str, Any]:
        """Return the row for a CSV file: one value a column, the same columns for equal sets of candidates."""
        record: dict[str, Any] = asdict(self.point)
        record.update(depth=self.depth, layers=self.layers, cold=self.cold, floor_us=self.floor_us, note=self.note)
        for name, result in self.results.items():
            label = name.replace(" ", "_")
            for key in FLAT:
                record[f"{label}_{key}"] = getattr(result, key)
            if name in self.peers and result.us is not None:
                record[f"{label}_ratio"] = self.peer_ratio(name)
        for profile in ("fast", "lossless"):
            if self.best(profile) is not None:
                record[f"{profile}_ratio"] = self.ratio(profile)
                record[f"{profile}_over_floor"] = self.over_floor(profile)
                record[f"{profile}_verdict"] = self.verdict(profile)
                record[f"{profile}_round_us"] = self.round_us(profile)
        record["build_us"] = self.build_us
        record["commit_floor_us"] = self.commit_floor_us
        for profile, result in self.commit.items():
            record[f"commit_{profile}_us"] = result.us
            record[f"commit_{profile}_error"] = result.error
            record[f"commit_{profile}_status"] = result.status
        return record

    def to_json(self) -> dict[str, Any]:
        """Return everything, nested."""
        record = asdict(self)
        for profile in ("fast", "lossless"):
            record[f"{profile}_verdict"] = self.verdict(profile)
            record[f"{profile}_ratio"] = self.ratio(profile)
        return record


def row_from_json(record: dict[str, Any]) -> Row:
    """Rebuild a row from :meth:`Row.to_json`, for plots of saved results."""
    known = {k: v for k, v in record.items() if k in Row.__dataclass_fields__}
    known["point"] = Point(**known["point"])
    for key in ("results", "commit"):
        known[key] = {name: Result(**value) for name, value in known[key].items()}
    return Row(**known)


def read_run(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """Return the rows and the provenance of a run's JSON file.

    Raises:
        ValueError: it cannot be read, or is no such file.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        rows, record = [row_from_json(r) for r in saved["rows"]], dict(saved["provenance"])
        record["device"]["name"], record["triton"], record["date"]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} was not written by --json: {type(error).__name__}: {error}") from None
    return rows, record
