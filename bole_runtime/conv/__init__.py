"""Short causal convolutions along the root-to-node paths of proposal trees, and the commit of their states."""

from __future__ import annotations

from bole_runtime.conv.api import conv_commit, prepare_conv_commit, tree_conv
from bole_runtime.conv.factors import ConvFactors, ConvPending

__all__ = ["ConvFactors", "ConvPending", "conv_commit", "prepare_conv_commit", "tree_conv"]
