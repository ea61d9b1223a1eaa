"""The device's part of decoding one batch: fixed tensors, and the round over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bole_runtime.integrations.transformers.cache import TreeCache
from bole_runtime.integrations.transformers.graphs import Recorded, Recorder
from bole_runtime.integrations.transformers.model import HybridModel
from bole_runtime.sampling import Acceptance, SamplingParams, accept
from bole_runtime.state import StateManager
from bole_runtime.state.round import Round
from bole_runtime.tree import TreeBatch


@dataclass(frozen=True)
class Outcome:
    """What a round left on the device.

    Attributes:
        summary: int32 or int64 [B, D + 2]: the new tokens of each row, how many there are, and its status.
        path: [B, D], nodes of the accepted path, -1 behind its end.
        hidden: [B, N, H], what the head got.
    """

    summary: torch.Tensor
    path: torch.Tensor
    hidden: torch.Tensor


class Sampling:
    """How tokens are drawn, in tensors that stay where they are.

    Args:
        params: copied; None is greedy.
        batch: rows.
        device: where the seeds are.
    """

    def __init__(self, params: SamplingParams | None, batch: int, device: torch.device) -> None:
        self.seeds = torch.zeros(batch, dtype=torch.int64, device=device)
        self.form = _form(params)
        self.params = None
        if params is not None:
            self.params = SamplingParams(
                batch, device=device, **{name: getattr(params, name).clone() for name in self.form}
            )

    def set(self, params: SamplingParams | None, seeds: torch.Tensor) -> None:
        """Take other values of the same form."""
        self.seeds.copy_(seeds)
        for name in self.form:
            getattr(self.params, name).copy_(getattr(params, name))

    def __call__(
        self, logits: torch.Tensor, tokens: torch.Tensor, tree: TreeBatch, positions: torch.Tensor
    ) -> Acceptance:
        """Accept."""
        if self.params is None:
            return accept(logits, tokens, tree)
        return accept(
            logits, tokens, tree, method="sample", params=self.params, seeds=self.seeds, positions=positions
        )  # fmt: skip


def _form(params: SamplingParams | None) -> tuple[str, ...]:
    names = ("temperature", "top_k", "top_p", "min_p")
    return () if params is None else tuple(n for n in names if getattr(params, n) is not None)


class Lane:
    """One batch after another: slots, keys and values, rounds by capacity, and what is recorded of them.

    Attributes:
        cache: of the attention layers.
        slots: int32 [B], set in place for every batch.
    """

    def __init__(self, hybrid: HybridModel, manager: StateManager, batch: int, nodes: int, recorder: Recorder) -> None:
        """Make tensors.

        Args:
            hybrid: the model.
            manager: states of its recurrent layers.
            batch: rows.
            nodes: most nodes of a tree.
            recorder: of the decoder.
        """
        self._hybrid, self._manager, self._recorder, self._batch = hybrid, manager, recorder, batch
        self.slots = torch.full((batch,), -1, dtype=torch.int32, device=hybrid.device)
        self.cache = TreeCache(batch, nodes, hybrid.device)
        self._rounds: dict[int, tuple[Round, torch.Tensor, torch.Tensor]] = {}
        self._sampling: dict[tuple[str, ...], Sampling] = {}
        self._recorded: dict[tuple[int, int, tuple[str, ...]], Recorded[Outcome]] = {}

    def begin(self, slots: list[int], params: SamplingParams | None, seeds: torch.Tensor) -> Sampling:
        """Start a batch; return how its tokens are drawn."""
        self.slots.copy_(torch.tensor(slots, dtype=torch.int32))
        form = _form(params)
        if form not in self._sampling:
            self._sampling[form] = Sampling(params, self._batch, self._hybrid.device)
        self._sampling[form].set(params, seeds)
        return self._sampling[form]

    def round(self, tokens: torch.Tensor, parents: torch.Tensor, sampling: Sampling) -> Outcome:
        """Verify, accept and commit one tree a row; there must be room in the cache for their paths.

        Args:
            tokens: int64 [B, N], on the host.
            parents: int64 [B, N], on the host.
            sampling: of this batch.
        """
        nodes = tokens.shape[1]
        if nodes not in self._rounds:
            tree = TreeBatch(self._batch, nodes, device=self._hybrid.device)
            made = self._manager.round(tree, self.slots)
            self._rounds[nodes] = made, tokens.to(self._hybrid.device), parents.to(self._hybrid.device)
        rnd, mine, own = self._rounds[nodes]
        mine.copy_(tokens)
        own.copy_(parents)
        key = nodes, self.cache.room, sampling.form
        if key not in self._recorded:
            # Of columns that are no more, nothing is called again.
            self._recorded = {k: v for k, v in self._recorded.items() if k[1] == self.cache.room}
            self._recorded[key] = Recorded(
                lambda: self._run(rnd, mine, own, sampling), self._recorder, lambda: rnd.abandon(launched=False)
            )
        return self._recorded[key]()

    def _run(self, rnd: Round, tokens: torch.Tensor, parents: torch.Tensor, sampling: Sampling) -> Outcome:
        rnd.tree.update_(parents)
        logits, hidden = self._hybrid.verify(tokens, rnd, self.cache)
        got = sampling(logits, tokens, rnd.tree, self.cache.lengths)
        rnd.commit(got.accepted)
        self.cache.keep(got)
        return Outcome(summary_of(got), got.path, hidden)

    def end(self) -> None:
        """End a batch, also in the middle of a round."""
        for rnd, _, _ in self._rounds.values():
            rnd.abandon()


def summary_of(got: Acceptance) -> torch.Tensor:
    """Return tokens, lengths and status side by side, so that one read of the device has all."""
    return torch.cat((got.tokens, got.lengths[:, None], got.status[:, None]), 1)
