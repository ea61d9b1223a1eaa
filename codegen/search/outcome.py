"""How much a run searches, and what it ends in."""

from __future__ import annotations

from dataclasses import dataclass, field

from bole_codegen.search.class_search import ClassSearch
from bole_codegen.search.finish import BucketResult
from bole_runtime.tables.schema import AnyEntry


@dataclass(frozen=True)
class Options:
    """How much to search.

    Attributes:
        trials: candidates a class.
        anchors: searched buckets a class.
        top: finalists a bucket, the default and the table's entry not counted.
        rounds: proposals are made in so many steps, each knowing the results of those before.
        time_budget: seconds for the whole run, None for no limit. Nothing is begun after it, what runs is given up.
        write_up: seconds of the budget kept for the table and the report.
    """

    trials: int = 40
    anchors: int = 3
    top: int = 4
    rounds: int = 4
    time_budget: float | None = None
    write_up: float | None = None


@dataclass
class RunResult:
    """The end of a run, or what there was of it when it was interrupted.

    Attributes:
        buckets: results, in the order in which they were finished.
        failures: candidates that failed, by kind.
        searches: classes that were searched, now or by an earlier run, with their histories.
        tried: candidates compiled and checked, those of earlier runs included.
        resumed: evaluations taken over from earlier runs.
        duplicates: candidates that rendered to kernels already tried.
        out_of_time: whether the budget ended the search.
        seconds: wall time.
        spent: seconds by what they were spent on, see :class:`bole_codegen.search.ledger.Ledger`.
        bandwidth_gbs: copy bandwidth that an earlier run measured, None where no result of one was taken.
    """

    buckets: list[BucketResult] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    searches: list[ClassSearch] = field(default_factory=list)
    tried: int = 0
    resumed: int = 0
    duplicates: int = 0
    out_of_time: bool = False
    seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    bandwidth_gbs: float | None = None

    def count(self, search: ClassSearch) -> None:
        """Add what was tried in a class."""
        self.tried += search.tried
        self.resumed += search.resumed
        self.duplicates += search.duplicates
        for kind, number in search.failures().items():
            self.failures[kind] = self.failures.get(kind, 0) + number

    @property
    def reused(self) -> int:
        """Buckets that earlier runs had finished."""
        return sum(b.reused for b in self.buckets)

    @property
    def entries(self) -> list[AnyEntry]:
        """Entries of every finished bucket."""
        return [b.entry for b in self.buckets if b.entry is not None]
