"""How long each class of a run may search, so that its time budget is kept and every bucket has a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bole_codegen.search.ledger import now

#: Seconds of a budget kept for the table and the report, unless the options say otherwise.
WRITE_UP = 3.0
#: Part of a budget that no class may search in: what was asked to stop takes a moment.
MARGIN = 0.03
#: Seconds of the device that the finalists of a bucket take, until some were seen.
FINISH_GUESS = {"measured": 0.8, "predicted": 0.05}
#: Seconds that the last finalists take to be compiled with another output type and checked.
CONFIRM_GUESS = {"measured": 12.0, "predicted": 0.0}
#: Seconds of a compiling process that the default of a class takes, until some were seen.
DEFAULT_GUESS = 12.0


@dataclass
class Deadline:
    """The time budget of a run.

    Attributes:
        label: ``measured`` or ``predicted``.
        begun: when the budget began, on the clock of the loop.
        budget: seconds, None for no limit.
        write_up: seconds of it kept for the table and the report, None for the usual.
        finished: seconds that finalists took, a bucket.
        defaults: seconds until the default of a class had a time.
    """

    label: str
    begun: float
    budget: float | None
    write_up: float | None = None
    finished: list[float] = field(default_factory=list)
    defaults: list[float] = field(default_factory=list)

    def left(self) -> float | None:
        """Return the seconds that are left before the write-up, None without a budget."""
        if self.budget is None:
            return None
        reserve = WRITE_UP if self.write_up is None else self.write_up
        return max(0.0, self.budget - reserve - (now() - self.begun))

    def share(self, unfinished: Sequence[int], ahead: int, abreast: int, workers: int, devices: int) -> float | None:
        """Return the seconds that a class may search for, None without a budget.

        What the classes that are not done need for their defaults and finalists is set aside; the rest is shared out.

        Args:
            unfinished: buckets of each class that is not done.
            ahead: of those, classes that have not begun.
            abreast: classes under way at a time.
            workers: compiling processes.
            devices: that time.
        """
        left = self.left()
        if left is None or self.budget is None:
            return None
        finish = _mean(self.finished, FINISH_GUESS[self.label])
        default = _mean(self.defaults, DEFAULT_GUESS / workers) / abreast
        aside = finish * sum(unfinished) / devices + default * ahead
        aside += CONFIRM_GUESS[self.label] + MARGIN * self.budget
        return max(0.0, left - aside) * min(1.0, abreast / max(1, len(unfinished)))


def _mean(values: Sequence[float], guess: float) -> float:
    return sum(values) / len(values) if values else guess
