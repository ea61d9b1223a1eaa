"""What a whole round costs, measured while an engine serves. Host code."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

#: Says what a forward of so many requests and nodes a request takes, in microseconds; None where nothing is known.
Estimate = Callable[[int, int], "float | None"]

_KEPT = 9
_ENOUGH = 3
_STALE_ROUNDS = 512
_STALE_DISCOUNT = 0.1


class RoundClock:
    """Turns the starts of rounds into their durations.

    A serving engine runs a step ahead of its GPU: it starts a round while the one before is still running. In a steady
    state the distance between two starts is what one round takes, but it may be that of the round before. So a distance
    counts only where the rounds around it were alike.
    """

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None
        self._at = 0.0
        self._alike = 0

    def start(self, batch: int, nodes: int, now: float) -> float | None:
        """Take the start of a round.

        Args:
            batch: requests.
            nodes: a request.
            now: seconds.

        Returns:
            Seconds that a round of this kind takes, or None where that cannot be told.
        """
        before, self._at = self._at, now
        if self._last != (batch, nodes):
            self._last, self._alike = (batch, nodes), 1
            return None
        self._alike += 1
        return now - before if self._alike > 3 else None

    def interrupt(self) -> None:
        """Something else ran between two rounds, such as a prompt."""
        self._last = None


class Cost(NamedTuple):
    """What a round takes.

    Attributes:
        us: microseconds.
        measured: whether it was seen; else it is the least that it can be.
    """

    us: float
    measured: bool


class RoundTimes:
    """Durations of rounds by batch and nodes a request: the median of the last few.

    A number of nodes that was not tried costs no less than a smaller one that was. With an ``estimate`` (a calibration
    of the forward) it costs what that says and what rounds of this batch took beyond it.

    Args:
        estimate: of the forward alone.
    """

    def __init__(self, estimate: Estimate | None = None) -> None:
        self._estimate = estimate
        self._seen: dict[int, dict[int, deque[float]]] = defaultdict(dict)
        self._rounds: dict[int, int] = defaultdict(int)
        self._fresh: dict[tuple[int, int], int] = {}

    def observe(self, batch: int, nodes: int, us: float) -> None:
        """Take the duration of a round."""
        self._rounds[batch] += 1
        self._fresh[batch, nodes] = self._rounds[batch]
        self._seen[batch].setdefault(nodes, deque(maxlen=_KEPT)).append(us)

    def measured(self, batch: int, nodes: int) -> bool:
        """Return whether there are enough rounds for a median."""
        return len(self._seen[batch].get(nodes, ())) >= _ENOUGH

    def median(self, batch: int, nodes: int) -> float | None:
        """Return the median duration in microseconds, as it was seen."""
        seen = self._seen[batch].get(nodes)
        return statistics.median(seen) if seen else None

    def cost(self, batch: int, nodes: int) -> Cost:
        """Return what a round takes.

        What has not been measured for long counts as a little cheaper, so that it is tried again before the context
        has grown out of what was seen.
        """
        if self.measured(batch, nodes):
            age = self._rounds[batch] - self._fresh[batch, nodes]
            discount = _STALE_DISCOUNT * min(age / _STALE_ROUNDS, 1.0)
            return Cost(statistics.median(self._seen[batch][nodes]) * (1.0 - discount), True)
        known = {n: statistics.median(t) for n, t in self._seen[batch].items() if len(t) >= _ENOUGH}
        least = max((us for n, us in known.items() if n <= nodes), default=0.0)
        forward = self._forward(batch, nodes)
        if forward is not None:
            pairs = [(us, self._forward(batch, n)) for n, us in known.items()]
            beyond = [us - other for us, other in pairs if other is not None]
            least = max(least, forward + max(statistics.fmean(beyond) if beyond else 0.0, 0.0))
        return Cost(least, False)

    def borrowed(self, batch: int, nodes: int) -> float | None:
        """Return what a round takes by what it takes in the nearest batch that has it, or None where none has.

        Scaled by a number of nodes that both batches have, the nearest one.
        """
        others = [b for b, seen in self._seen.items() if b != batch and seen.get(nodes)]
        if not others:
            return None
        other = min(others, key=lambda b: (max(b, batch) / max(min(b, batch), 1), b))
        both = [n for n, seen in self._seen[batch].items() if seen and self._seen[other].get(n)]
        us = statistics.median(self._seen[other][nodes])
        if not both:
            return us
        near = min(both, key=lambda n: (abs(n - nodes), n))
        return us * statistics.median(self._seen[batch][near]) / statistics.median(self._seen[other][near])

    def _forward(self, batch: int, nodes: int) -> float | None:
        return None if self._estimate is None else self._estimate(batch, nodes)
