"""Decoding in one call: all new tokens of a batch, or those of one prompt as they come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bole_runtime.integrations.transformers.decode import AnyDrafter, Prompts, TreeDecoder
from bole_runtime.integrations.transformers.draft import PromptLookup
from bole_runtime.integrations.transformers.inputs import as_rows, pad_token


def stream(
    model: Any,
    input_ids: Prompts,
    *,
    drafter: AnyDrafter | None = None,
    budget: int = 15,
    policy: str = "eager",
    **options: Any,
) -> Iterator[int]:
    """Decode one prompt and yield its tokens as they are known, several at a time where a path was accepted.

    Args:
        model: see :class:`TreeDecoder`.
        input_ids: int [P] or [1, P], or a list of tokens.
        drafter: default, :class:`~bole_runtime.integrations.transformers.PromptLookup`.
        budget: most nodes of a proposal.
        policy: of the state manager.
        **options: of :meth:`TreeDecoder.rounds`.

    Returns:
        An iterator over the new tokens.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is wrong.
    """
    decoder = TreeDecoder(model, PromptLookup() if drafter is None else drafter, budget=budget, policy=policy)
    rounds = decoder.rounds(input_ids, **options)
    return (token for result in rounds for token in result.tokens[0])


def generate(
    model: Any,
    input_ids: Prompts,
    *,
    drafter: AnyDrafter | None = None,
    budget: int = 15,
    policy: str = "eager",
    **options: Any,
) -> torch.Tensor | list[list[int]]:
    """Decode prompts with proposal trees: the tokens of ``model.generate(..., do_sample=False)``, or drawn by seeds.

    Args:
        model: see :class:`TreeDecoder`.
        input_ids: int [B, P] or [P], or token lists, which may differ in length.
        drafter: default, :class:`~bole_runtime.integrations.transformers.PromptLookup`.
        budget: most nodes of a proposal.
        policy: of the state manager.
        **options: of :meth:`TreeDecoder.rounds`: ``attention_mask``, ``max_new_tokens``, ``params``, ``seeds``,
            ``eos_token_id``.

    Returns:
        For a tensor, prompts and new tokens, int64 [B, P + new], padded as ``model.generate`` does. For lists, prompt
        and new tokens of each.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is wrong.
    """
    prompts = as_rows(input_ids)
    decoder = TreeDecoder(
        model,
        PromptLookup() if drafter is None else drafter,
        budget=budget,
        max_batch=max(1, len(prompts)),
        policy=policy,
    )
    new: list[list[int]] = [[] for _ in prompts]
    for result in decoder.rounds(input_ids, **options):
        for row, tokens in zip(new, result.tokens, strict=True):
            row.extend(tokens)
    rows = [prompt + row for prompt, row in zip(prompts, new, strict=True)]
    if not isinstance(input_ids, torch.Tensor):
        return rows
    pad, width = pad_token(model, options.get("eos_token_id")), max(len(row) for row in rows)
    return torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=input_ids.device)
