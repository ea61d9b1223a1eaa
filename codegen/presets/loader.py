"""Reads models.json into presets."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from bole_codegen.presets.preset import ModelPreset

# "model dtype": the state follows the weights, which these models release in bf16.
_STATE_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "model dtype": "bf16"}


class UnknownModelError(ValueError):
    """A model name that no preset has."""


@cache
def load_presets() -> Mapping[str, ModelPreset]:
    """Return every preset by its released name, in the order of the file (by family, then name)."""
    text = resources.files(__package__).joinpath("models.json").read_text(encoding="utf-8")
    presets = [_preset(record) for record in json.loads(text)]
    return MappingProxyType({preset.name: preset for preset in presets})


def get_preset(name: str) -> ModelPreset:
    """Return a preset by name; case does not matter (``qwen3.5-9b``).

    Raises:
        UnknownModelError: there is no such preset. The message suggests close names.
    """
    by_lower = {key.lower(): preset for key, preset in load_presets().items()}
    preset = by_lower.get(name.strip().lower())
    if preset is not None:
        return preset
    close = difflib.get_close_matches(name.strip().lower(), by_lower, n=3, cutoff=0.6)
    names = ", ".join(by_lower[c].name for c in close) if close else ", ".join(load_presets())
    raise UnknownModelError(f"unknown model {name!r}. {'Did you mean' if close else 'Known models'}: {names}")


def _preset(record: dict[str, Any]) -> ModelPreset:
    hk, hv, dk, dv = (record.get(name) for name in ("hk", "hv", "dk", "dv"))
    if record["family"] == "mamba2":
        # q = C and k = B [groups, N], v = x [heads, P]: the state is P x N a head.
        hk, hv, dk, dv = (record[name] for name in ("groups", "heads", "N", "P"))
    state_dtype, channels = record.get("state_dtype"), record.get("conv_channels")
    return ModelPreset(
        name=record["name"],
        family=record["family"],
        layers=record["layers"],
        recurrent_layers=record["recurrent_layers"],
        hk=hk,
        hv=hv,
        dk=dk,
        dv=dv,
        gate=MappingProxyType(record.get("gate") or {}),
        state_dtype=_STATE_DTYPES[state_dtype] if state_dtype else "fp32",
        state_dtype_known=state_dtype is not None,
        conv_width=record.get("conv_width"),
        conv_channels=tuple(dict.fromkeys(channels if isinstance(channels, list) else [channels] if channels else [])),
        conv_state_dtype=_STATE_DTYPES[record.get("conv_state_dtype") or "model dtype"],
        raw=MappingProxyType(record),
    )
