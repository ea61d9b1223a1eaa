"""Dynamic trees: expand the most probable frontier level by level, then keep the best nodes (EAGLE-2)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bole_runtime.tree.build_torch import PADDING
from bole_runtime.tree.check import INDEX_DTYPES, check_capacity


class Candidates(NamedTuple):
    """Drafted nodes of a batch, C a request, a parent before its child.

    Attributes:
        parents: int32 [B, C], -1 for node 0, -2 for padding.
        tokens: int64 [B, C].
        log_probs: fp32 [B, C], cumulative over the path from the root, which has 0; -inf for padding.
    """

    parents: torch.Tensor
    tokens: torch.Tensor
    log_probs: torch.Tensor


class Selection(NamedTuple):
    """Nodes that were kept, in the order of the candidates; padding at the end.

    Attributes:
        parents: int32 [B, N], for :meth:`TreeBatch.update_`.
        tokens: int64 [B, N]; -1 for padding.
        log_probs: fp32 [B, N].
        chosen: int64 [B, N], index among the candidates; -1 for padding.
    """

    parents: torch.Tensor
    tokens: torch.Tensor
    log_probs: torch.Tensor
    chosen: torch.Tensor


class TopKDraft:
    """Grows a draft tree a request as EAGLE-2 does (Li et al. 2024, arXiv 2406.16858), all requests side by side.

    The root's k most probable tokens are the first level. Each next level expands the k most probable nodes of the
    last one by k children each; all of them stay candidates. At the end the most probable candidates over all levels
    are kept: :meth:`best` the same number for every request, :func:`bole_runtime.budget.allocate` a number of its own.
    Shapes are fixed and nothing is read back, so a CUDA graph can hold every step.

    Example:
        >>> import torch
        >>> draft = TopKDraft(batch=1, top_k=2, levels=2)
        >>> frontier = draft.start(torch.tensor([7]), torch.tensor([[3, 4]]), torch.tensor([[0.6, 0.3]]))
        >>> frontier = draft.expand(torch.tensor([[[5, 6], [8, 9]]]), torch.tensor([[[0.9, 0.1], [0.5, 0.2]]]))
        >>> draft.best(4).tokens.tolist()  # of 3 (0.6), 4 (0.3), 5 (0.54), 6 (0.06), 8 (0.15), 9 (0.06)
        [[7, 3, 4, 5]]
    """

    def __init__(self, batch: int, top_k: int, levels: int, device: torch.device | str = "cpu") -> None:
        """Allocate the candidates.

        Args:
            batch: requests.
            top_k: width k of the frontier, and children a node.
            levels: levels below the root.
            device: where the tensors live.

        Raises:
            TypeError: a number is no int.
            ValueError: a number is out of range.
        """
        self.batch = check_capacity("batch", batch, 0, 2**31 - 1)
        self.top_k = check_capacity("top_k", top_k, 1, 512)
        self.levels = check_capacity("levels", levels, 1, 511)
        size = 1 + top_k + (levels - 1) * top_k * top_k
        self.candidates = Candidates(
            torch.full((batch, size), PADDING, dtype=torch.int32, device=device),
            torch.full((batch, size), -1, dtype=torch.int64, device=device),
            torch.full((batch, size), float("-inf"), device=device),
        )
        self._frontier = torch.zeros(batch, top_k, dtype=torch.int64, device=device)
        self._level = 0

    def start(self, tokens: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Begin a round.

        Args:
            tokens: int [B], the last emitted token of each request; -1 for padding rows.
            ids: int [B, k], the draft's candidates after it.
            probs: fp32 [B, k], their probabilities.

        Returns:
            int64 [B, k], tokens of the frontier: what the draft model reads next.

        Raises:
            ValueError: wrong shapes.
        """
        wanted = (self.batch, self.top_k)
        _shapes(("tokens", tokens, (self.batch,)), ("ids", ids, wanted), ("probs", probs, wanted))
        live = tokens >= 0
        made = self.candidates
        made.parents.fill_(PADDING)
        made.tokens.fill_(-1)
        made.log_probs.fill_(float("-inf"))
        made.tokens[:, 0] = tokens
        made.parents[:, 0] = torch.where(live, -1, PADDING).int()
        made.log_probs[:, 0] = torch.where(live, 0.0, float("-inf"))
        self._frontier.zero_()
        self._level = 0
        return self._add(ids.unsqueeze(1), probs.unsqueeze(1), self._frontier[:, :1])

    def expand(self, ids: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Add a level.

        Args:
            ids: int [B, k, k], candidates after each node of the frontier.
            probs: fp32 [B, k, k], their probabilities given that node.

        Returns:
            int64 [B, k], tokens of the new frontier.

        Raises:
            ValueError: wrong shapes, or all levels are there.
        """
        if not 0 < self._level < self.levels:
            raise ValueError(f"expand: level {self._level} of {self.levels}; allowed after start, up to the last level")
        wanted = (self.batch, self.top_k, self.top_k)
        _shapes(("ids", ids, wanted), ("probs", probs, wanted))
        return self._add(ids, probs, self._frontier)

    @property
    def frontier(self) -> torch.Tensor:
        """int64 [B, k], candidate indices of the frontier, in order of probability (whose hidden states to read)."""
        return self._frontier

    def _add(self, ids: torch.Tensor, probs: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        made, k = self.candidates, self.top_k
        first = 1 if self._level == 0 else 1 + k + (self._level - 1) * k * k
        last = first + ids.shape[1] * k
        # Probabilities above 1 or NaN would put a child before its parent.
        steps = probs.float().nan_to_num(0.0).clamp(0.0, 1.0).log()
        scores = (made.log_probs.gather(1, above).unsqueeze(2) + steps).flatten(1)
        alive = scores > float("-inf")
        parents = above.unsqueeze(2).expand(-1, -1, k).flatten(1)
        made.log_probs[:, first:last] = scores
        made.parents[:, first:last] = torch.where(alive, parents, PADDING).int()
        made.tokens[:, first:last] = torch.where(alive, ids.flatten(1).long(), -1)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
        self._frontier.copy_(first + order)
        self._level += 1
        return made.tokens.gather(1, self._frontier)

    def best(self, nodes: int) -> Selection:
        """Keep the ``nodes`` most probable candidates of each request, the root included; see :func:`keep_best`."""
        return keep_best(self.candidates, nodes)


def keep_best(candidates: Candidates, nodes: int) -> Selection:
    """Keep the most probable candidates of each request. Connected, because no child is more probable than its parent
    and ties go to the lower index.

    Args:
        candidates: C a request.
        nodes: N, 1 to C.

    Raises:
        TypeError: ``nodes`` is no int.
        ValueError: ``nodes`` is out of range.
    """
    parents, tokens, scores = candidates
    batch, size = parents.shape
    check_capacity("nodes", nodes, 1, size)
    clean = torch.where((parents == PADDING) | scores.isnan(), float("-inf"), scores)
    chosen = clean.sort(dim=1, descending=True, stable=True).indices[:, :nodes].sort(1).values
    live = clean.gather(1, chosen) > float("-inf")
    # Live ones first, in their order.
    rank = torch.where(live, chosen, size)
    chosen = rank.sort(1).values
    live = chosen < size
    place = torch.full((batch, size + 1), PADDING, dtype=torch.int64, device=parents.device)
    index = torch.arange(nodes, device=parents.device).expand(batch, nodes)
    place.scatter_(1, chosen, index)
    at = chosen.clamp(max=size - 1)
    above = parents.gather(1, at).long()
    moved = torch.where(above < 0, above, place.gather(1, above.clamp(min=0)))
    return Selection(
        torch.where(live, moved, PADDING).int(),
        torch.where(live, tokens.gather(1, at), -1),
        torch.where(live, scores.gather(1, at), float("-inf")),
        torch.where(live, chosen, -1),
    )


def _shapes(*given: tuple[str, torch.Tensor, tuple[int, ...] | torch.Size]) -> None:
    for name, tensor, shape in given:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if name != "probs" and tensor.dtype not in INDEX_DTYPES:
            raise TypeError(f"{name}: dtype {tensor.dtype} is not allowed; allowed: torch.int32, torch.int64")
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(tensor.shape)}")
