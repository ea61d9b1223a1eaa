"""Short causal convolutions along the root-to-node paths of proposal trees, and the commit of their states."""

from __future__ import annotations

from bole_runtime.conv.api import conv_commit, prepare_conv_commit, tree_conv
from bole_runtime.conv.factors import ConvFactors, ConvPending
from bole_runtime.conv.warming import WarmConv, warmup_conv

__all__ = [
    "ConvFactors",
    "ConvPending",
    "WarmConv",
    "conv_commit",
    "prepare_conv_commit",
    "tree_conv",
    "warmup_conv",
]
