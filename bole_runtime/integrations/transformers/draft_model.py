"""A small model as drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bole_runtime.integrations.transformers.draft import Proposal, Trie


class ModelDrafter:
    """A chain of a small causal language model's most probable tokens, with the next most probable ones as siblings.

    Any transformers model with a ``forward(input_ids)`` that returns ``logits``, with the vocabulary of the target. It
    reads the whole text at every step, with no cache: simple, and right for models that are small beside the target.
    """

    def __init__(self, model: Any, depth: int = 4, width: int = 2) -> None:
        """Take a model.

        Args:
            model: the small model, in eval mode.
            depth: tokens of the chain.
            width: tokens at each step, the one of the chain included.

        Raises:
            ValueError: ``depth`` or ``width`` is below 1.
        """
        for name, value in (("depth", depth), ("width", width)):
            if value < 1:
                raise ValueError(f"{name}: {value} is not allowed; allowed: 1 or more")
        self.model, self.depth, self.width = model, depth, width

    @torch.no_grad()
    def propose(self, context: Sequence[int], budget: int) -> Proposal:
        """Return the tree; see :class:`~bole_runtime.integrations.transformers.Drafter`."""
        trie, text, node = Trie(budget), list(context), -1
        device = next(self.model.parameters()).device
        for _ in range(self.depth):
            if trie.full:
                break
            ids = torch.tensor([text], device=device)
            logits = self.model(input_ids=ids, use_cache=False).logits[0, -1]
            best = logits.topk(min(self.width, logits.shape[-1])).indices.tolist()
            made = [trie.child(node, token) for token in best]
            node = made[0]
            text.append(best[0])
        return trie.proposal()
