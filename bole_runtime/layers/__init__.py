"""Whole recurrent layers between their projections, composed of the library's operations."""

from __future__ import annotations

from bole_runtime.layers.gated_delta_net import LAYOUTS, GatedDeltaNet, LayerFactors, commit_layers

__all__ = ["LAYOUTS", "GatedDeltaNet", "LayerFactors", "commit_layers"]
