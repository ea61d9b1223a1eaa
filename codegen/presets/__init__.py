"""Model presets: recurrent geometries of released models, as data with their sources."""

from __future__ import annotations

from bole_codegen.presets.loader import UnknownModelError, get_preset, load_presets
from bole_codegen.presets.preset import ModelPreset, ShardedGeometry

__all__ = ["ModelPreset", "ShardedGeometry", "UnknownModelError", "get_preset", "load_presets"]
