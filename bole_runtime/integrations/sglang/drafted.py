"""What the drafter expects of trees of several sizes, read where SGLang picks the nodes of a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

#: Requests of a round, at most; rounds of more leave no sums. A captured graph needs a buffer that stays.
_ROWS = 4096

_current: DraftedSums | None = None


class DraftedSums:
    """Sums of the cumulative draft probabilities of the most probable nodes, by number of nodes.

    Written by the draft's CUDA graphs, so the buffer is made once.

    Args:
        candidates: numbers of nodes, the root included, ascending.
        device: of the drafter.

    Attributes:
        buffer: fp32 [rows, candidates]; rows beyond those of the last draft hold what was there, and so does all of it
            after a round without drafts. A root alone has no sum; its column means nothing.
    """

    @torch.inference_mode(False)
    def __init__(self, candidates: Sequence[int], device: torch.device | str) -> None:
        self.buffer = torch.zeros(_ROWS, len(candidates), device=device)
        self._last = torch.tensor([max(n - 2, 0) for n in candidates], device=device)
        self._most = candidates[-1] - 1

    def take(self, score_list: Sequence[torch.Tensor]) -> None:
        """Take the scores of a draft: [rows, 1, topk], then [rows, topk, topk] a step."""
        scores = torch.cat(list(score_list), dim=1).flatten(1)
        rows, count = scores.shape[0], min(self._most, scores.shape[1])
        if rows > _ROWS or count == 0:
            return
        sums = scores.topk(count, dim=-1).values.float().cumsum(-1)
        self.buffer[:rows].copy_(sums.index_select(1, self._last.clamp(max=count - 1)))


def install(sums: DraftedSums | None) -> None:
    """Let the drafts of this process write there; None for nowhere."""
    global _current
    _current = sums


def organize(original: Callable[..., Any], score_list: Sequence[torch.Tensor], *args: Any, **more: Any) -> Any:
    """Around ``organize_draft_results``, which has the probabilities and returns the tree without them."""
    if _current is not None:
        _current.take(score_list)
    return original(score_list, *args, **more)
