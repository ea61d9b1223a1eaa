"""Budget policies, run on the library's own allocation, acceptance and correction."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from bole_runtime.budget import AcceptanceModel, CalibrationTable, allocate, choose_capacity, published_nodes
from bole_runtime.sampling import accept_predicted
from bole_runtime.tree import MAX_NODES, Candidates, TreeBatch, keep_best
from budget_sim.acceptance import Recorded, Round, Synthetic


@dataclass
class Settings:
    """What all policies share.

    Attributes:
        table: cost of a forward.
        kv: context length.
        draft_us: time of drafting one round.
        nodes: nodes a request that budgets choose from.
        probe: after a round in which plain decoding was best, the next so many are decoded without drafting.
    """

    table: CalibrationTable
    kv: int
    draft_us: float
    nodes: list[int]
    probe: int = 8


@dataclass
class Result:
    """Sums over the rounds of one policy and batch."""

    batch: int
    policy: str
    tokens: int = 0
    time_us: float = 0.0
    nodes: int = 0
    rounds: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the batch."""
        return self.tokens / self.time_us * 1e6

    @property
    def mean_nodes(self) -> float:
        """Nodes a request and round."""
        return self.nodes / (self.rounds * self.batch)

    @property
    def mean_tokens(self) -> float:
        """Tokens a request and round."""
        return self.tokens / (self.rounds * self.batch)


def tokens_of(drawn: Round, tree: TreeBatch, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return drafts and the target's tokens of the verified nodes, [rows]; a candidate's token is its index.

    Args:
        drawn: the candidates.
        tree: what is verified.
        chosen: int64 [rows], flat candidate of each row, -1 for none.
    """
    size = drawn.parents.shape[1]
    at = chosen.clamp(min=0)
    # A token that nobody drafted has an id of its own.
    said = torch.where(drawn.follow < 0, size, drawn.follow).flatten()[at]
    return torch.where(chosen >= 0, chosen % size, -1), said


class Fixed:
    """The same number of nodes for every request, its most probable ones."""

    def __init__(self, nodes: int, name: str) -> None:
        self.nodes, self.name = nodes, name

    def step(self, drawn: Round, settings: Settings, result: Result) -> None:
        """Simulate a round."""
        batch, size = drawn.parents.shape
        nodes = min(self.nodes, size)
        made = keep_best(Candidates(drawn.parents, torch.zeros_like(drawn.follow), drawn.scores.log()), nodes)
        tree = TreeBatch.from_parents(made.parents)
        start = torch.arange(batch).unsqueeze(1) * size
        chosen = torch.where(made.chosen >= 0, made.chosen + start, -1)
        drafts, said = tokens_of(drawn, tree, chosen.flatten())
        got = accept_predicted(said.view(batch, nodes), drafts.view(batch, nodes), tree)
        cost = settings.table.cost(batch, nodes, settings.kv)
        _count(result, got.lengths, cost + settings.draft_us * (nodes > 1), batch * nodes)


class Goodput:
    """The number of nodes with the most expected tokens per second, allocated over the batch."""

    def __init__(self, correct: bool) -> None:
        self.name = "goodput" if correct else "goodput, uncorrected"
        self._correct = correct
        self._model = AcceptanceModel()
        self._off = 0

    def step(self, drawn: Round, settings: Settings, result: Result) -> None:
        """Simulate a round."""
        batch, size = drawn.parents.shape
        decode = settings.table.cost(batch, 1, settings.kv)
        if self._off:
            self._off -= 1
            _count(result, torch.ones(batch), decode, batch)
            return
        totals = [batch * n for n in settings.nodes]
        costs = [settings.table.cost(batch, n, settings.kv) + settings.draft_us for n in settings.nodes]
        # Decoding without a draft is what the next rounds would cost.
        costs[0] = decode
        scores = self._model.correct(drawn.scores) if self._correct else drawn.scores
        most = min(size, MAX_NODES)
        picked, _ = choose_capacity(drawn.parents, scores, torch.tensor(totals), torch.tensor(costs), max_nodes=most)
        bucket = int(picked)
        tree = TreeBatch(batch, most, max_total=totals[bucket])
        made = allocate(drawn.parents, scores, totals[bucket], tree)
        drafts, said = tokens_of(drawn, tree, made.chosen)
        got = accept_predicted(said, drafts, tree)
        self._model.update(made.take(drawn.scores, fill=0.0), tree, got)
        _count(result, got.lengths, settings.table.cost(batch, settings.nodes[bucket], settings.kv)
               + settings.draft_us, totals[bucket])  # fmt: skip
        if bucket == 0:
            self._off = settings.probe


def _count(result: Result, lengths: torch.Tensor, time_us: float, nodes: int) -> None:
    result.tokens += int(lengths.sum())
    result.time_us += time_us
    result.nodes += nodes
    result.rounds += 1


@dataclass
class Simulation:
    """All policies on the same drafts, for several batch sizes."""

    settings: Settings
    source: Synthetic | Recorded
    fixed: list[int]
    eps: float
    rounds: int
    seed: int
    results: list[Result] = field(default_factory=list)

    def run(self, batch: int) -> list[Result]:
        """Simulate one batch size; returns and keeps the results."""
        published = published_nodes(self.settings.table, batch, self.settings.kv, self.eps)
        policies = [
            *(Fixed(n, f"fixed {n}") for n in self.fixed),
            Fixed(published, f"published (eps {self.eps:g})"),
            Goodput(correct=False),
            Goodput(correct=True),
        ]
        made = [Result(batch, p.name) for p in policies]
        for drawn in self.source.rounds(batch, self.rounds, self.seed):
            for policy, result in zip(policies, made, strict=True):
                policy.step(drawn, self.settings, result)
        self.results.extend(made)
        return made
