"""What proposes trees: the interface, the check of what a drafter returned, and prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch


class Proposal(NamedTuple):
    """Nodes under the last token of a text, in topological order.

    Attributes:
        tokens: one a node.
        parents: index of a node before it, or -1 for a child of the last token of the text.
    """

    tokens: Sequence[int]
    parents: Sequence[int]


@runtime_checkable
class Drafter(Protocol):
    """Anything with this method. What it returns decides how fast decoding is, never which tokens come out."""

    def propose(self, context: Sequence[int], budget: int) -> Proposal:
        """Propose a tree.

        Args:
            context: prompt and all tokens emitted so far; the last one is the root. Not to be changed.
            budget: most nodes.

        Returns:
            At most ``budget`` nodes; none is allowed.
        """
        ...


class DraftSession(Protocol):
    """What a :class:`HiddenDrafter` keeps of the texts of one batch."""

    def observe(self, row: int, hidden: torch.Tensor) -> None:
        """Take the hidden states of the next committed tokens of a text.

        Args:
            row: of the batch.
            hidden: [n, H], what the model's head gets, in the order of the tokens. All but the last token of the text
                have been observed when a tree is proposed.
        """
        ...

    def propose(self, contexts: Sequence[Sequence[int] | None], budget: int) -> Sequence[Proposal]:
        """Propose a tree for every text of the batch.

        Args:
            contexts: of each row; as for :meth:`Drafter.propose`. None where no tree is wanted in this round.
            budget: most nodes of a tree.

        Returns:
            One proposal a row; those of rows without a context are not looked at.
        """
        ...

    def end(self) -> None:
        """The batch has ended, or decoding was given up."""
        ...


@runtime_checkable
class HiddenDrafter(Protocol):
    """A drafter that reads the model's hidden states, such as an MTP head."""

    def begin(self, rows: int) -> DraftSession:
        """Start with ``rows`` new texts; sessions that are open already are not touched."""
        ...


def checked(proposal: Proposal, budget: int, vocabulary: int, drafter: object) -> Proposal:
    """Return a proposal as lists.

    Raises:
        ValueError: it is no tree within the budget, or a token is outside the vocabulary.
    """
    name = f"{type(drafter).__name__}.propose"
    tokens, parents = list(proposal[0]), list(proposal[1])
    if len(tokens) != len(parents):
        raise ValueError(f"{name}: returned {len(tokens)} tokens and {len(parents)} parents; one a node is allowed")
    if len(tokens) > budget:
        raise ValueError(f"{name}: returned {len(tokens)} nodes; allowed: at most {budget}")
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not 0 <= token < vocabulary:
            raise ValueError(f"{name}: token {token} of node {i} is not allowed; allowed: 0 to {vocabulary - 1}")
        if not -1 <= parent < i:
            raise ValueError(f"{name}: parent {parent} of node {i} is not allowed; allowed: -1 to {i - 1}")
    return Proposal(tokens, parents)


class Trie:
    """Merges continuations into a tree in which no two children of a node hold the same token."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    @property
    def full(self) -> bool:
        """Whether the budget is used up."""
        return len(self.tokens) >= self.budget

    def child(self, parent: int, token: int) -> int:
        """Return the child of ``parent`` (-1: the root) with a token, made if it is new and fits; else -2."""
        key = (parent, token)
        if key not in self._children:
            if self.full:
                return -2
            self._children[key] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
        return self._children[key]

    def add(self, continuation: Sequence[int]) -> None:
        """Add a path from the root, as much of it as fits."""
        node = -1
        for token in continuation:
            node = self.child(node, token)
            if node == -2:
                return

    def proposal(self) -> Proposal:
        """Return the tree so far."""
        return Proposal(self.tokens, self.parents)


class PromptLookup:
    """What followed the last few tokens where they occurred before, in the prompt or in the output.

    Occurrences of the longest n-gram at the end of the text come first, the latest first among equals; shorter ones
    follow while there is room. Several continuations become the branches of one tree.
    """

    def __init__(self, max_ngram: int = 4, min_ngram: int = 1, depth: int = 12, branches: int = 4) -> None:
        """Choose what is looked up.

        Args:
            max_ngram: longest n-gram.
            min_ngram: shortest n-gram.
            depth: most tokens of a continuation.
            branches: most continuations.

        Raises:
            ValueError: one of them is below 1, or ``min_ngram`` is above ``max_ngram``.
        """
        given = {"max_ngram": max_ngram, "min_ngram": min_ngram, "depth": depth, "branches": branches}
        for name, value in given.items():
            if value < 1:
                raise ValueError(f"{name}: {value} is not allowed; allowed: 1 or more")
        if min_ngram > max_ngram:
            raise ValueError(f"min_ngram: {min_ngram} is not allowed; allowed: at most max_ngram = {max_ngram}")
        self.max_ngram, self.min_ngram, self.depth, self.branches = max_ngram, min_ngram, depth, branches

    def propose(self, context: Sequence[int], budget: int) -> Proposal:
        """Return the branches found; see :class:`Drafter`."""
        trie, text, last = Trie(budget), list(context), len(context) - 1
        # One pass over the text, then only where its last token occurs.
        found = [(self._common(text, end), end) for end, token in enumerate(text[:last]) if token == text[last]]
        longest = sorted((pair for pair in found if pair[0] >= self.min_ngram), reverse=True)
        for _, end in longest[: self.branches]:
            trie.add(text[end + 1 : end + 1 + self.depth])
        return trie.proposal()

    def _common(self, text: list[int], end: int) -> int:
        """Return how many tokens up to ``end`` are those at the end of the text, at most ``max_ngram``."""
        most = min(self.max_ngram, end + 1)
        return next((n for n in range(1, most) if text[end - n] != text[-1 - n]), most)
