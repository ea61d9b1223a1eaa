"""Whole recurrent layers between their projections, composed of the library's operations."""

from __future__ import annotations

from bole_runtime.layers.gated_delta_net import LAYOUTS, GatedDeltaNet
from bole_runtime.layers.mamba2 import Mamba2
from bole_runtime.layers.shared import LayerFactors, commit_layers

__all__ = ["LAYOUTS", "GatedDeltaNet", "LayerFactors", "Mamba2", "commit_layers"]
