"""Live progress: a bar with rate, time left, the best so far and failures; plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from bole_codegen.search.kinds import kind_of
from bole_codegen.search.progress import Progress
from bole_codegen.search.results import KINDS, Failed, Measurement, Screening, Timed
from bole_codegen.search.targets import Target
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config

#: Seconds between two lines where there is no terminal.
LINE_EVERY = 10.0


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


class _Counting(Progress):
    """Counts what both kinds show."""

    def __init__(self) -> None:
        self.candidates = self.tried = 0
        self.failed: Counter[str] = Counter()
        self._lost: set[tuple[Specialisation, Config]] = set()
        self.buckets = self.done = 0
        self.best: dict[Target, float] = {}
        self.last_best = ""

    def begin(self, classes: int, buckets: int, candidates: int, finished: int) -> None:
        """See :class:`Progress`."""
        self.candidates, self.buckets = candidates, buckets
        self.note(
            f"{_count(buckets, 'bucket')} in {_count(classes, 'group')} with kernels of its own, "
            f"up to {_count(candidates, 'candidate')}"
            + (f"; {_count(finished, 'bucket')} finished by an earlier run" if finished else "")
        )

    def screened(self, config: Config, result: Screening) -> None:
        """See :class:`Progress`."""
        self.tried += 1
        if isinstance(result, Failed):
            self.failed[result.kind] += 1

    def timed(self, target: Target, config: Config, result: Measurement) -> None:
        """See :class:`Progress`."""
        # A candidate that fails in several buckets is one that failed.
        if isinstance(result, Failed) and (target.kernels, config) not in self._lost:
            self._lost.add((target.kernels, config))
            self.failed[result.kind] += 1
        if isinstance(result, Timed) and result.median_us < self.best.get(target, float("inf")):
            self.best[target] = result.median_us
            p = target.problem
            self.last_best = f"{result.median_us:.2f} us {kind_of(p).brief(p)} n{p.nodes} w{p.work} {config.variant}"

    def finished(self, target: Target, median_us: float | None, default_us: float | None) -> None:
        """See :class:`Progress`."""
        self.done += 1

    def failures(self) -> str:
        """Return how many candidates failed, and of what: ``12 failed: 9 spills, 2 wrong, 1 hang``."""
        known = [kind for kind in (*KINDS, *(self.failed.keys() - KINDS)) if self.failed[kind]]
        kinds = ", ".join(f"{self.failed[k]} {k}" for k in sorted(known, key=lambda k: -self.failed[k]))
        return f"{self.failed.total()} failed" + (f": {kinds}" if kinds else "")


class LineProgress(_Counting):
    """Lines to a stream, at most one every few seconds."""

    def __init__(self, stream: TextIO, budget: float | None = None) -> None:
        super().__init__()
        self._budget = budget
        self._stream = stream
        self._begin = time.monotonic()
        self._last = self._begin

    def note(self, text: str) -> None:
        """See :class:`Progress`."""
        print(text, file=self._stream, flush=True)

    def screened(self, config: Config, result: Screening) -> None:
        """See :class:`Progress`."""
        super().screened(config, result)
        self._line()

    def timed(self, target: Target, config: Config, result: Measurement) -> None:
        """See :class:`Progress`."""
        super().timed(target, config, result)
        self._line()

    def finished(self, target: Target, median_us: float | None, default_us: float | None) -> None:
        """See :class:`Progress`."""
        super().finished(target, median_us, default_us)
        self._line()

    def _line(self) -> None:
        now = time.monotonic()
        if now - self._last < LINE_EVERY:
            return
        self._last = now
        elapsed = now - self._begin
        rate = self.tried / elapsed
        left = (self.candidates - self.tried) / rate if self.tried else float("inf")
        if self._budget is not None:
            left = min(left, max(0.0, self._budget - elapsed))
        eta = f", about {left:.0f} s left" if 0 < left < float("inf") else ""
        best = f"; last improvement {self.last_best}" if self.last_best else ""
        self.note(
            f"[{elapsed:5.0f} s] {self.tried} of up to {_count(self.candidates, 'candidate')} "
            f"({rate:.1f} a second{eta}); "
            f"{self.failures()}; {self.done} of {_count(self.buckets, 'bucket')} done{best}"
        )


class RichProgress(_Counting):
    """Bars in a terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            # What is left of the line: a long text is cut, and never squeezes the numbers.
            TextColumn(
                "{task.fields[more]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
            ),
            console=console,
            expand=True,
            transient=True,
        )
        self._candidates = self._bars.add_task("candidates", total=None, more="")
        self._buckets = self._bars.add_task("buckets", total=None, more="")

    def begin(self, classes: int, buckets: int, candidates: int, finished: int) -> None:
        """See :class:`Progress`."""
        super().begin(classes, buckets, candidates, finished)
        self._bars.update(self._candidates, total=candidates)
        self._bars.update(self._buckets, total=buckets)
        self._bars.start()

    def note(self, text: str) -> None:
        """See :class:`Progress`."""
        self._console.print(Text(text))

    def phase(self, text: str) -> None:
        """See :class:`Progress`."""
        self._bars.update(self._buckets, more=text)

    def screened(self, config: Config, result: Screening) -> None:
        """See :class:`Progress`."""
        super().screened(config, result)
        self._update()

    def timed(self, target: Target, config: Config, result: Measurement) -> None:
        """See :class:`Progress`."""
        super().timed(target, config, result)
        self._update()

    def finished(self, target: Target, median_us: float | None, default_us: float | None) -> None:
        """See :class:`Progress`."""
        super().finished(target, median_us, default_us)
        self._bars.update(self._buckets, completed=self.done)

    def end(self) -> None:
        """See :class:`Progress`."""
        self._bars.stop()

    def _update(self) -> None:
        # What a narrow terminal cuts off is the end: the best, which the table says again.
        more = self.failures() + (f"; best {self.last_best}" if self.last_best else "")
        self._bars.update(self._candidates, completed=self.tried, more=more)


def make_progress(quiet: bool = False, stream: TextIO | None = None, budget: float | None = None) -> Progress:
    """Return bars for a terminal, lines for anything else, nothing when quiet.

    Args:
        quiet: say nothing.
        stream: default, stderr.
        budget: seconds that the run may take, for the time left.
    """
    stream = sys.stderr if stream is None else stream
    if quiet:
        return Progress()
    console = Console(file=stream)
    # A dumb terminal cannot move its cursor: bars would show nothing at all.
    bars = console.is_terminal and not console.is_dumb_terminal
    return RichProgress(console) if bars else LineProgress(stream, budget)
