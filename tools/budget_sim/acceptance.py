"""Drafts and what a target would accept of them: synthetic, or recorded from a real pair of models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bole_runtime.tree import TopKDraft


class Round(NamedTuple):
    """Candidates of a batch, C a request.

    Attributes:
        parents: int32 [B, C].
        scores: fp32 [B, C], the drafter's cumulative probabilities.
        follow: int64 [B, C], the candidate that the target takes after each one, -1 for a token nobody drafted.
    """

    parents: torch.Tensor
    scores: torch.Tensor
    follow: torch.Tensor


class Synthetic:
    """A drafter whose certainty differs by request and by token, and a target that agrees a little less than it says.

    A request has an ease in (0, 1). At a node the drafter gives its first token a Beta-distributed probability around
    the ease, and each next one half of what is left. The target takes a child of probability p with
    p ** overconfidence.
    """

    def __init__(self, top_k: int = 4, levels: int = 8, overconfidence: float = 1.3, ease: float = 0.65) -> None:
        self.top_k, self.levels, self.overconfidence, self.ease = top_k, levels, overconfidence, ease
        self.name = f"synthetic (top-{top_k}, {levels} levels, ease {ease}, overconfidence {overconfidence})"

    def rounds(self, batch: int, count: int, seed: int) -> Iterator[Round]:
        """Yield rounds of a batch."""
        rng = np.random.default_rng((seed, batch))
        for _ in range(count):
            yield self._round(rng, rng.beta(8 * self.ease, 8 * (1 - self.ease), batch))

    def _children(self, rng: np.random.Generator, ease: np.ndarray, nodes: int) -> torch.Tensor:
        mean = np.clip(ease, 0.02, 0.98)[:, None]
        first = rng.beta(4 * mean, 4 * (1 - mean), (len(ease), nodes))
        rest = (1 - first)[..., None] * 0.5 ** np.arange(1, self.top_k)
        return torch.from_numpy(np.concatenate([first[..., None], rest], -1)).float()

    def _round(self, rng: np.random.Generator, ease: np.ndarray) -> Round:
        batch, k = len(ease), self.top_k
        draft = TopKDraft(batch, k, self.levels)
        size = draft.candidates.parents.shape[1]
        follow = torch.full((batch, size), -1, dtype=torch.int64)
        probs = self._children(rng, ease, 1)
        draft.start(torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, k, dtype=torch.int64), probs[:, 0])
        self._decide(rng, follow, torch.zeros(batch, 1, dtype=torch.int64), probs, 1)
        for level in range(1, self.levels):
            above = draft.frontier.clone()
            probs = self._children(rng, ease, k)
            draft.expand(torch.zeros(batch, k, k, dtype=torch.int64), probs)
            self._decide(rng, follow, above, probs, 1 + k + (level - 1) * k * k)
        made = draft.candidates
        return Round(made.parents, made.log_probs.exp(), follow)

    def _decide(
        self, rng: np.random.Generator, follow: torch.Tensor, above: torch.Tensor, probs: torch.Tensor, first: int
    ) -> None:
        true = (probs**self.overconfidence).cumsum(-1)
        drawn = torch.from_numpy(rng.random(above.shape)).float().unsqueeze(-1)
        rank = (true <= drawn).sum(-1)
        child = first + torch.arange(above.shape[1]) * self.top_k + rank
        follow.scatter_(1, above, torch.where(rank < self.top_k, child, -1))


class Recorded:
    """Rounds recorded from a real drafter and target.

    The file is a NumPy ``.npz`` (read without pickle) with ``parents`` int [R, C], ``scores`` float [R, C] and
    ``follow`` int [R, C] as in :class:`Round`, one row a recorded request and round. Batches draw rows with
    replacement.
    """

    def __init__(self, path: Path) -> None:
        """Read and check a recording.

        Raises:
            ValueError: arrays are missing, differ in shape, or hold indices outside the row.
        """
        with np.load(path, allow_pickle=False) as file:
            missing = {"parents", "scores", "follow"} - set(file.files)
            if missing:
                raise ValueError(f"{path}: has no array {', '.join(sorted(missing))}")
            parents, scores, follow = (file[n] for n in ("parents", "scores", "follow"))
        if parents.ndim != 2 or parents.shape != scores.shape or parents.shape != follow.shape or not parents.size:
            raise ValueError(
                f"{path}: expected three arrays [R, C], got {parents.shape}, {scores.shape}, {follow.shape}"
            )
        index = np.arange(parents.shape[1])
        if not ((parents >= -2) & (parents < index)).all():
            raise ValueError(f"{path}: parents must come before their children")
        below = np.take_along_axis(parents, np.clip(follow, 0, parents.shape[1] - 1), 1)
        if not ((follow >= -1) & (follow < parents.shape[1])).all() or not ((follow < 0) | (below == index)).all():
            raise ValueError(f"{path}: follow must name children, or -1")
        self._rows = Round(
            torch.from_numpy(parents.astype(np.int32)),
            torch.from_numpy(scores.astype(np.float32)),
            torch.from_numpy(follow.astype(np.int64)),
        )
        self.name = f"recorded ({path.name}, {len(parents)} rounds)"

    def rounds(self, batch: int, count: int, seed: int) -> Iterator[Round]:
        """Yield rounds of a batch."""
        gen = torch.Generator().manual_seed(seed * 1000 + batch)
        for _ in range(count):
            rows = torch.randint(0, self._rows.parents.shape[0], (batch,), generator=gen)
            yield Round(*(part[rows] for part in self._rows))
