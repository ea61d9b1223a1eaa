"""Links of a tree, built as SGLang does: children are prepended, the last node first."""

from __future__ import annotations


def links_of(parents: list[int], nodes: int | None = None) -> tuple[list[int], list[int]]:
    """Return next_token and next_sibling for parents with one root, node 0; -2 leaves a node out."""
    size = len(parents) if nodes is None else nodes
    next_token, next_sibling = [-1] * size, [-1] * size
    for i in range(len(parents) - 1, 0, -1):
        if parents[i] == -2:
            continue
        next_sibling[i] = next_token[parents[i]]
        next_token[parents[i]] = i
    return next_token, next_sibling


def follow(next_token: list[int], next_sibling: list[int]) -> list[int]:
    """Return the parents, by following the lists from node 0 as a walk does; -2 for what is never met."""
    size = len(next_token)
    parents = [-2] * size
    parents[0] = -1
    stack = [0]
    while stack:
        node = stack.pop()
        child = next_token[node]
        while 0 < child < size and parents[child] == -2:
            parents[child] = node
            stack.append(child)
            child = next_sibling[child]
    return parents
