"""Proposal trees of a batch as device tensors with host capacities."""

from __future__ import annotations

from bole_runtime.tree.buckets import Capacity, CapacityBuckets
from bole_runtime.tree.build_torch import STATUS_DEPTH, STATUS_NODES, STATUS_ORDER, STATUS_PARENT, STATUS_TOTAL
from bole_runtime.tree.dynamic import Candidates, Selection, TopKDraft, keep_best
from bole_runtime.tree.links import parents_from_links
from bole_runtime.tree.shapes import StaticTree, chain, k_ary, sequoia
from bole_runtime.tree.tree import MAX_NODES, TreeBatch

__all__ = [
    "MAX_NODES",
    "STATUS_DEPTH",
    "STATUS_NODES",
    "STATUS_ORDER",
    "STATUS_PARENT",
    "STATUS_TOTAL",
    "Candidates",
    "Capacity",
    "CapacityBuckets",
    "Selection",
    "StaticTree",
    "TopKDraft",
    "TreeBatch",
    "chain",
    "k_ary",
    "keep_best",
    "parents_from_links",
    "sequoia",
]
