"""Prompts in the forms that users have them, where a text ends, and the tensors of a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bole_runtime.integrations.transformers.draft import Proposal


class Request:
    """A text that grows.

    Attributes:
        text: prompt and new tokens.
        prompt: tokens of the prompt.
        left: tokens still wanted.
        done: whether it has ended.
    """

    def __init__(self, text: list[int], new_tokens: int, stop: frozenset[int]) -> None:
        self.text, self.prompt, self.left = text, len(text), new_tokens
        self._stop = stop
        self.done = False

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Append tokens up to the end of the text; return those appended."""
        added: list[int] = []
        for token in tokens:
            if self.done:
                break
            added.append(token)
            self.left -= 1
            self.done = self.left == 0 or token in self._stop
        self.text.extend(added)
        return added


def as_rows(input_ids: object) -> list[list[int]]:
    """Return prompts as lists of tokens.

    Raises:
        TypeError: neither a tensor of integers nor lists of integers.
        ValueError: a tensor with more than two dimensions.
    """
    if isinstance(input_ids, torch.Tensor):
        if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype is torch.bool:
            raise TypeError(f"input_ids: dtype {input_ids.dtype} is not allowed; allowed: integers")
        if input_ids.dim() not in (1, 2):
            raise ValueError(f"input_ids: expected shape [P] or [B, P], got {tuple(input_ids.shape)}")
        rows: list[list[int]] = (input_ids if input_ids.dim() == 2 else input_ids[None]).tolist()
        return rows
    if not isinstance(input_ids, Sequence) or isinstance(input_ids, str):
        raise TypeError(f"input_ids: expected a tensor or lists of tokens, got {type(input_ids).__name__}")
    single = all(isinstance(t, int) for t in input_ids)
    rows = [list(input_ids)] if single and len(input_ids) else [list(row) for row in input_ids]
    wrong = [t for row in rows for t in row if not isinstance(t, int) or isinstance(t, bool)]
    if wrong:
        raise TypeError(f"input_ids: {wrong[0]!r} is not allowed; allowed: integers")
    return rows


def requests(input_ids: object, attention_mask: torch.Tensor | None, vocabulary: int) -> list[list[int]]:
    """Return the prompts without padding.

    Raises:
        TypeError: wrong types.
        ValueError: no prompt, an empty one, a token outside the vocabulary, or a mask of another shape.
    """
    rows = as_rows(input_ids)
    if attention_mask is not None:
        if not isinstance(input_ids, torch.Tensor) or attention_mask.shape != input_ids.shape:
            wanted = tuple(input_ids.shape) if isinstance(input_ids, torch.Tensor) else "a tensor as input_ids"
            raise ValueError(f"attention_mask: expected {wanted}, got {tuple(attention_mask.shape)}")
        kept = attention_mask.reshape(-1, attention_mask.shape[-1]).tolist()
        rows = [[t for t, m in zip(row, mask, strict=True) if m] for row, mask in zip(rows, kept, strict=True)]
    if not rows:
        raise ValueError("input_ids: no prompt; allowed: one or more")
    for b, row in enumerate(rows):
        if not row:
            raise ValueError(f"input_ids: prompt {b} is empty; allowed: one token or more")
        wrong = [t for t in row if not 0 <= t < vocabulary]
        if wrong:
            raise ValueError(f"input_ids: {wrong[0]} in prompt {b} is not allowed; allowed: 0 to {vocabulary - 1}")
    return rows


def stop_tokens(model: Any, given: int | Sequence[int] | None) -> frozenset[int]:
    """Return the tokens that end a text: those given, else the model's."""
    if given is None:
        given = getattr(model.generation_config, "eos_token_id", None)
    if given is None:
        return frozenset()
    return frozenset([given] if isinstance(given, int) else (int(t) for t in given))


def pad_token(model: Any, stop: int | Sequence[int] | None) -> int:
    """Return what fills the rows of texts that ended early: the model's padding token, else one that ends a text."""
    given = getattr(model.generation_config, "pad_token_id", None)
    return int(given) if given is not None else min(stop_tokens(model, stop), default=0)


def joined(
    texts: Sequence[Request], proposals: Sequence[Proposal | None], nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and parents of a round, int64 [B, nodes] on the host: the last token of each text, its proposal
    below it, then padding; all padding where there is no proposal."""
    tokens, parents = torch.zeros(len(texts), nodes, dtype=torch.long), torch.full((len(texts), nodes), -2)
    for b, (request, proposal) in enumerate(zip(texts, proposals, strict=True)):
        if proposal is not None:
            count = 1 + len(proposal.tokens)
            tokens[b, :count] = torch.tensor([request.text[-1], *proposal.tokens])
            parents[b, :count] = torch.tensor([-1, *(p + 1 for p in proposal.parents)])
    return tokens, parents
