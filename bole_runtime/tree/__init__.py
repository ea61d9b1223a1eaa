"""Proposal trees of a batch as device tensors with host capacities."""

from __future__ import annotations

from bole_runtime.tree.build_torch import STATUS_DEPTH, STATUS_NODES, STATUS_ORDER, STATUS_PARENT
from bole_runtime.tree.tree import MAX_NODES, TreeBatch

__all__ = ["MAX_NODES", "STATUS_DEPTH", "STATUS_NODES", "STATUS_ORDER", "STATUS_PARENT", "TreeBatch"]
