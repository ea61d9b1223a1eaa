"""The goodput rule while an engine serves: times and acceptance are those of its own rounds. Host code.

For engines whose rounds have one number of nodes for all requests, a few of which were captured as graphs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from bole_runtime.budget.round_times import RoundTimes

_FADE = 0.98
_SMOOTH = 0.3
_MARGIN = 0.03
_HOLD_TRIAL, _HOLD_CHOICE = 8, 24
_TRIALS, _TRIAL_ROUNDS = 3, 1024
_BLIND = 256


class AcceptanceByNodes:
    """Accepted drafts a request and round, for several numbers of nodes.

    Trees are nested: one of fewer nodes holds the most probable ones of a larger one. ``drafted`` is the sum of the
    cumulative draft probabilities of its nodes (without the root), which is what a drafter that is right gets
    accepted. Drafters are not right, so what was accepted for each one predicted is learned, by number of nodes. A
    number that was not tried gets what the next larger one does, the most it can, so that it is tried; one larger than
    all that were tried is predicted from the nearest, or gets all it can where the drafter was not deep enough to say.

    Args:
        candidates: numbers of nodes, the root included, ascending.
        depths: largest number of drafts that can be accepted, of each.

    Raises:
        ValueError: the lists do not fit.
    """

    def __init__(self, candidates: Sequence[int], depths: Sequence[int]) -> None:
        if not candidates or list(candidates) != sorted(set(candidates)) or len(depths) != len(candidates):
            raise ValueError(f"candidates, depths: {list(candidates)} and {list(depths)} are no ascending pairs")
        self._depths = dict(zip(candidates, depths, strict=True))
        self._drafted = dict.fromkeys(candidates, 1.0)
        self._met: set[int] = set()
        self._sums = {n: [0.0, 0.0] for n in candidates}  # accepted, predicted; both fade

    def observe(self, nodes: int, accepted: float, drafted: Sequence[float] | None) -> None:
        """Take a round.

        Args:
            nodes: a request.
            accepted: drafts accepted, mean of the requests.
            drafted: of each candidate, mean of the requests; None where the drafter's probabilities are not known.
        """
        if drafted is not None:
            for n, value in zip(self._depths, drafted, strict=True):
                # Shallower drafting says too little of trees that are deeper; a root alone needs no drafter.
                if self._depths[n] > self._depths[nodes] or not self._depths[n] or not value > 0:
                    continue
                self._drafted[n] += (value - self._drafted[n]) * (_SMOOTH if n in self._met else 1.0)
                self._met.add(n)
        predicted = self._drafted[nodes]
        if drafted is not None and self._depths[nodes]:
            own = drafted[list(self._depths).index(nodes)]
            predicted = own if own > 0 else predicted
        sums = self._sums[nodes]
        sums[0] = sums[0] * _FADE + accepted
        sums[1] = sums[1] * _FADE + predicted

    @property
    def seen(self) -> bool:
        """Whether any round with drafts was."""
        return any(predicted > 0 for n, (_, predicted) in self._sums.items() if self._depths[n])

    def expected(self) -> dict[int, float]:
        """Return the accepted drafts a request to expect of each candidate; all 0 before anything was seen."""
        tried = [n for n, (_, predicted) in self._sums.items() if predicted > 0]
        made = dict.fromkeys(self._depths, 0.0)
        if not tried:
            return made
        for n, depth in self._depths.items():
            near = min(tried, key=lambda t: (abs(t - n), t))
            accepted, predicted = self._sums[near]
            known = near == n or n in self._met or not self._met
            made[n] = min(accepted / predicted * self._drafted[n], float(depth)) if known else float(depth)
        floor = 0.0
        for n in made:  # ascending: a larger tree gets no fewer drafts accepted than a smaller one
            larger = [made[t] for t in tried if t > n]
            own = min(min(larger), float(self._depths[n])) if larger and n not in tried else made[n]
            made[n] = floor = max(floor, own)
        return made


class OnlineBudget:
    """Chooses the number of nodes a request with the most expected tokens per second.

    A number whose rounds were not timed yet for a batch counts as if it took the least it can, so it is tried as long
    as it may be the best. A choice is kept for some rounds, and left only for one that is better by 3 %. Rounds without
    drafts (one node) teach nothing of drafts, so now and then the next best is tried.

    Args:
        candidates: numbers of nodes a request, ascending, the root included.
        depths: largest number of drafts that can be accepted, of each.
        times: of rounds.

    Attributes:
        rounds: how many were chosen, by batch and nodes.

    Raises:
        ValueError: the lists do not fit.
    """

    def __init__(self, candidates: Sequence[int], depths: Sequence[int], times: RoundTimes) -> None:
        self.acceptance = AcceptanceByNodes(candidates, depths)
        self.times = times
        self.rounds: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._candidates = tuple(candidates)
        self._current = candidates[-1]
        self._batch = 0
        self._hold = 0
        self._drafts = {n for n, depth in zip(candidates, depths, strict=True) if depth}
        self._blind = 0  # rounds without drafts since the last with them
        self._trials: dict[tuple[int, int], int] = defaultdict(int)

    def choose(self, batch: int) -> int:
        """Return the nodes a request of the next round.

        Args:
            batch: requests, as many as the graph has rows.
        """
        self._hold -= 1
        if batch != self._batch or self._hold <= 0:
            self._decide(batch)
        self._blind = 0 if self._current in self._drafts else self._blind + 1
        self.rounds[batch][self._current] += 1
        return self._current

    def rates(self, batch: int) -> dict[int, float]:
        """Return the expected tokens per second and request of each candidate; infinite where nothing bounds it."""
        accepted = self.acceptance.expected()
        made = {}
        for n in self._candidates:
            us = self._us(batch, n)
            made[n] = (1.0 + accepted[n]) / (us * 1e-6) if us > 0 else float("inf")
        return made

    def _us(self, batch: int, nodes: int) -> float:
        """Return the cost; of what could not be timed when it was tried, as other batches have it."""
        cost = self.times.cost(batch, nodes)
        again = sum(self.rounds[batch].values()) // _TRIAL_ROUNDS  # batches that came and went may stay the next time
        if cost.measured or self._trials[batch, nodes] < _TRIALS + again:
            return cost.us
        return max(self.times.borrowed(batch, nodes) or 0.0, cost.us)

    def _decide(self, batch: int) -> None:
        self._batch = batch
        if not self.acceptance.seen:  # the engine starts with the largest number, which says most of the others
            self._hold = 1
            return
        rates = self.rates(batch)
        order = sorted(self._candidates, key=lambda n: (rates[n], n == self._current, -n), reverse=True)
        best = order[0]
        if best == self._current and self._blind >= _BLIND:
            self._current, self._hold = order[1], _HOLD_TRIAL
            return
        keeps = rates[best] <= rates[self._current] * (1.0 + _MARGIN)
        if not keeps:
            self._current = best
        timed = self.times.measured(batch, self._current)
        if not timed:
            self._trials[batch, self._current] += 1
        self._hold = _HOLD_CHOICE if timed else _HOLD_TRIAL
