"""Trees drafted by an MTP head, for all texts of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bole_runtime.integrations.transformers.cache import columns_for
from bole_runtime.integrations.transformers.draft import Proposal, Trie
from bole_runtime.integrations.transformers.graphs import Recorded, Recorder
from bole_runtime.integrations.transformers.mtp import MtpHead


class MtpDrafter:
    """Proposes with an :class:`MtpHead`: a chain of its most probable tokens, with the next most probable as siblings.

    :class:`~bole_runtime.integrations.transformers.TreeDecoder` hands it the model's hidden states of committed tokens,
    so each round costs one pass of the head over the new ones and one a further token of the chain, for all texts of a
    batch together.

    Args:
        head: in eval mode.
        depth: tokens of the chain.
        width: tokens at each step, the one of the chain included.
        cuda_graphs: record a round's passes in a CUDA graph, where the model can be recorded.

    Raises:
        ValueError: ``depth`` or ``width`` is below 1.
    """

    def __init__(self, head: MtpHead, depth: int = 4, width: int = 2, cuda_graphs: bool = False) -> None:
        for name, value in (("depth", depth), ("width", width)):
            if value < 1:
                raise ValueError(f"{name}: {value} is not allowed; allowed: 1 or more")
        self.head, self.depth, self.width = head, depth, width
        self.recorder = Recorder(cuda_graphs and next(head.parameters()).is_cuda)
        # By rows: what a session that ended has recorded serves the next one.
        self._idle: dict[int, list[_Head]] = {}

    def begin(self, rows: int) -> MtpSession:
        """Start with ``rows`` new texts."""
        return MtpSession(self, rows)

    def take(self, rows: int) -> _Head:
        """Return the head over the texts of a batch, which has read nothing."""
        idle = self._idle.get(rows)
        made = idle.pop() if idle else _Head(self, rows)
        made.lengths.zero_()
        return made

    def give_back(self, made: _Head) -> None:
        """Keep what is recorded for a later batch."""
        if self.recorder.enabled:
            self._idle.setdefault(made.lengths.shape[0], []).append(made)


class _Columns:
    """Stands in for a transformers cache of the head's one layer: new keys and values go to the columns told."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.columns = 0
        #: int64 [B, n], of the tokens of the next call.
        self.where = torch.empty(0)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take keys and values [B, heads, n, D]; return those of all columns."""
        if self.keys is None or self.values is None:
            shape = (*keys.shape[:2], self.columns, keys.shape[3])
            self.keys, self.values = keys.new_zeros(shape), values.new_zeros(shape)
        rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
        self.keys[rows, :, self.where] = keys.transpose(1, 2)
        self.values[rows, :, self.where] = values.transpose(1, 2)
        return self.keys, self.values

    def widen(self, columns: int, kept: int) -> None:
        """Change the number of columns; the first ``kept`` stay."""
        self.columns = columns
        for name in ("keys", "values"):
            old = getattr(self, name)
            if old is not None:
                new = old.new_zeros(*old.shape[:2], columns, old.shape[3])
                new[:, :, :kept] = old[:, :, :kept]
                setattr(self, name, new)


class _Head:
    """The head over the texts of one batch, in tensors that stay where they are.

    A text has its first ``room`` columns, behind which are ``depth`` for the tokens of a draft, the last of them
    for what is dropped.

    Attributes:
        lengths: int64 [B], tokens of each text that have been through the head.
    """

    def __init__(self, drafter: MtpDrafter, rows: int) -> None:
        self._head, self._depth, self._width = drafter.head, drafter.depth, drafter.width
        self._recorder = drafter.recorder
        weight = next(drafter.head.parameters())
        size, steps = drafter.head.project.out_features, drafter.depth + 1
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        self._hidden = torch.zeros(rows, steps, size, dtype=weight.dtype, device=weight.device)
        self._tokens = torch.zeros(rows, steps, dtype=torch.int64, device=weight.device)
        self._counts = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        self._cache, self._room = _Columns(), 0
        self._usual: Recorded[torch.Tensor] | None = None

    def draft(self, hidden: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, longest: int) -> torch.Tensor:
        """Read new tokens and draft.

        Args:
            hidden: [B, n, H], of the token before each.
            tokens: int64 [B, n], on the host.
            counts: int64 [B], how many are new, on the host.
            longest: text, in tokens that will have been through the head.

        Returns:
            int64 [B, depth, width], the most probable tokens at each step of the chain, of rows with new tokens.
        """
        if longest > self._room:
            kept, self._room = self._room, columns_for(longest)
            self._cache.widen(self._room + self._depth, kept)
            self._usual = None
        device = self.lengths.device
        if hidden.shape[1] > self._depth + 1:
            return self._draft(hidden, tokens.to(device), counts.to(device))
        # What most rounds have, at most the path of a whole chain and its root, always in the same shape.
        self._hidden[:, : hidden.shape[1]] = hidden
        self._tokens[:, : tokens.shape[1]] = tokens.to(device)
        self._counts.copy_(counts)
        if self._usual is None:
            self._usual = Recorded(lambda: self._draft(self._hidden, self._tokens, self._counts), self._recorder)
        return self._usual()

    def _draft(self, hidden: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        head, cache, room = self._head, self._cache, self._room
        device, last = hidden.device, room + self._depth - 1
        columns = torch.arange(room + self._depth, device=device)
        steps = torch.arange(tokens.shape[1], device=device)
        rows = torch.arange(tokens.shape[0], device=device)
        positions = self.lengths[:, None] + steps
        cache.where = torch.where(steps < counts[:, None], positions, last)
        mask = (columns <= positions[:, :, None]) & (columns < room)
        x = head.step(hidden, tokens, positions, mask[:, None], cache)
        x = x[rows, (counts - 1).clamp(min=0)][:, None]
        self.lengths += counts
        made = []
        for step in range(self._depth):
            logits = head.logits(x)[:, 0]
            made.append(logits.topk(min(self._width, logits.shape[-1])).indices)
            if step + 1 == self._depth:
                break
            positions = (self.lengths + step)[:, None]
            cache.where = torch.full_like(positions, room + step)
            mask = (columns < self.lengths[:, None]) | ((columns >= room) & (columns <= room + step))
            x = head.step(x, made[-1][:, :1], positions, mask[:, None, None], cache)
        return torch.stack(made, 1)


class MtpSession:
    """The texts of one batch, and hidden states that have not been through the head."""

    def __init__(self, drafter: MtpDrafter, rows: int) -> None:
        self._drafter, self._head = drafter, drafter.take(rows)
        self._new: list[list[torch.Tensor]] = [[] for _ in range(rows)]
        self._done = [0] * rows

    def observe(self, row: int, hidden: torch.Tensor) -> None:
        """Take the hidden states [n, H] of the next n committed tokens of a text."""
        self._new[row].append(hidden)

    @torch.no_grad()
    def propose(self, contexts: Sequence[Sequence[int] | None], budget: int) -> list[Proposal]:
        """Return a tree for each text whose last token, the root, has not been through the model yet.

        Args:
            contexts: of all rows; None where nothing is wanted, whose new hidden states wait.
            budget: most nodes.
        """
        counts = [0] * len(contexts)
        for b, context in enumerate(contexts):
            if context is not None:
                counts[b] = sum(part.shape[0] for part in self._new[b])
        most = max(counts)
        empty = Proposal((), ())
        if not most:
            return [empty] * len(contexts)
        tokens = torch.zeros(len(contexts), most, dtype=torch.int64)
        first = next(parts[0] for parts, count in zip(self._new, counts, strict=True) if count)
        hidden = first.new_zeros(len(contexts), most, first.shape[1])
        for b, context in enumerate(contexts):
            if context is not None and counts[b]:
                done, self._done[b] = self._done[b], self._done[b] + counts[b]
                tokens[b, : counts[b]] = torch.tensor(list(context[done + 1 : done + 1 + counts[b]]))
                hidden[b, : counts[b]] = torch.cat(self._new[b])
                self._new[b] = []
        best = self._head.draft(hidden, tokens, torch.tensor(counts), max(self._done)).tolist()
        return [_tree(best[b], budget) if counts[b] else empty for b in range(len(contexts))]

    def end(self) -> None:
        """Leave the head to the next batch."""
        self._drafter.give_back(self._head)


def _tree(best: list[list[int]], budget: int) -> Proposal:
    """Return the chain of the first tokens with the others as siblings, as much as fits."""
    trie, node = Trie(budget), -1
    for tokens in best:
        made = [trie.child(node, token) for token in tokens]
        node = made[0]
        if trie.full:
            break
    return trie.proposal()
