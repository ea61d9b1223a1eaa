"""Proposal trees by shape name, as parent indices.

Node 0 is the only root (the last sampled token) and a parent always comes before its children.
"""

from __future__ import annotations

import heapq
import re

import numpy as np
from numpy.typing import NDArray

#: Shape names with a fixed meaning; any list of branching factors such as ``2,2,2`` is a shape too.
SHAPES: tuple[str, ...] = ("chain", "2,2,2", "3,3,3", "ragged", "binary", "star")
RAGGED_TOP_K = 4
RAGGED_LEVELS = 8


def _by_level(nodes: int, branching: tuple[int, ...]) -> NDArray[np.int32]:
    """Fill level by level with ``branching`` children a node; after the last given level every leaf grows a chain."""
    parents = np.full(nodes, -1, np.int32)
    level, start, depth = [0], 1, 0
    while start < nodes:
        width = branching[depth] if depth < len(branching) else 1
        children: list[int] = []
        for parent in level:
            for _ in range(width):
                if start < nodes:
                    parents[start] = parent
                    children.append(start)
                    start += 1
        level, depth = children, depth + 1
    return parents


def _ragged(nodes: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """Keep the ``nodes`` most probable nodes of a random draft: at most 4 children a node, 8 levels, each row its own.

    Every node draws its children's probabilities; the best by cumulative probability are kept, as draft models with
    a budget do. Nodes are then ordered by level.
    """
    # Entries: (-log probability, node id). Chosen nodes get ids in the order in which they are picked.
    heap: list[tuple[float, int, int, int]] = []
    parent_of, depth_of = [-1], [0]
    serial = 0

    def expand(node: int, cost: float) -> None:
        nonlocal serial
        if depth_of[node] + 1 >= RAGGED_LEVELS:
            return
        chances = np.maximum(rng.dirichlet((1.6, 0.8, 0.5, 0.3, 0.8))[:RAGGED_TOP_K], 1e-9)
        for chance in chances:
            serial += 1
            heapq.heappush(heap, (cost - float(np.log(chance)), serial, node, depth_of[node] + 1))

    expand(0, 0.0)
    while len(parent_of) < nodes:
        cost, _, parent, depth = heapq.heappop(heap)
        parent_of.append(parent)
        depth_of.append(depth)
        expand(len(parent_of) - 1, cost)
    order = np.argsort(np.asarray(depth_of), kind="stable")
    position = np.empty(nodes, np.int32)
    position[order] = np.arange(nodes, dtype=np.int32)
    parents = np.asarray(parent_of, np.int32)[order]
    return np.where(parents >= 0, position[np.maximum(parents, 0)], -1).astype(np.int32)


def shape_name(shape: str) -> str:
    """Return the name of a shape without brackets and blanks."""
    return shape.strip().strip("[]").replace(" ", "")


def make_parents(shape: str, batch: int, nodes: int, seed: int = 0) -> NDArray[np.int32]:
    """Build parents ``[batch, nodes]`` (int32, -1 for the root).

    Args:
        shape: ``chain``; ``binary`` (balanced); ``star`` (all nodes are children of the root); ``ragged`` (top-4, 8
            levels, random and different for every request); or branching factors a level such as ``2,2,2``, whose
            leaves grow chains once the tree is full.
        batch: number of requests.
        nodes: nodes a request, the root included.
        seed: for the random shape.

    Raises:
        ValueError: an unknown shape, or sizes that make no tree.
    """
    if batch < 0 or nodes < 1:
        raise ValueError(f"need batch >= 0 and nodes >= 1, got {batch} and {nodes}")
    name = shape_name(shape)
    index = np.arange(nodes, dtype=np.int32)
    if name == "chain":
        row = index - 1
    elif name == "star":
        row = np.where(index == 0, -1, 0).astype(np.int32)
    elif name == "binary":
        row = np.where(index == 0, -1, (index - 1) // 2).astype(np.int32)
    elif name == "ragged":
        rng = np.random.default_rng(seed)
        if batch == 0:
            return np.empty((0, nodes), np.int32)
        return np.stack([_ragged(nodes, rng) for _ in range(batch)])
    elif re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", name):
        row = _by_level(nodes, tuple(int(x) for x in name.split(",")))
    else:
        raise ValueError(f"unknown tree shape {shape!r}; known: {', '.join(SHAPES)}, or branching factors like 4,2,1")
    return np.repeat(row[None].astype(np.int32), batch, axis=0)


def tree_depths(parents: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the number of strict ancestors of every node, ``[batch, nodes]``; -1 for padding (parent -2).

    Raises:
        ValueError: a parent does not come before its child.
    """
    parents = np.asarray(parents)
    depths = np.zeros(parents.shape, np.int32)
    for i in range(parents.shape[1]):
        p = parents[:, i]
        if bool((p >= i).any()) or bool((p < -2).any()):
            raise ValueError(f"node {i} has a parent that does not come before it")
        above = np.take_along_axis(depths, np.maximum(p, 0)[:, None], 1)[:, 0]
        depths[:, i] = np.where(p >= 0, above + 1, np.where(p == -1, 0, -1))
    return depths


def tree_depth(parents: NDArray[np.int32]) -> int:
    """Return the depth of a batch of trees: the largest number of strict ancestors."""
    depths = tree_depths(parents)
    return int(depths.max(initial=0))
