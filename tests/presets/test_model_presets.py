"""Model presets: lookup, geometry per rank, and the data itself."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from bole_codegen.presets import ShardedGeometry, UnknownModelError, get_preset, load_presets


def test_lookup_ignores_case() -> None:
    preset = get_preset(" qwen3.5-9b ")
    assert preset.name == "Qwen3.5-9B"
    assert (preset.family, preset.hk, preset.hv, preset.dk, preset.dv) == ("gdn", 16, 32, 128, 128)
    assert (preset.recurrent_layers, preset.state_dtype, preset.conv_width) == (24, "fp32", 4)


def test_typo_is_answered_with_close_names() -> None:
    with pytest.raises(UnknownModelError, match=r"Did you mean: .*Qwen3\.5-9B"):
        get_preset("qwen3.5-9")
    with pytest.raises(UnknownModelError, match="Known models: Jet-Nemotron-2B"):
        get_preset("zzzz")


def test_shard_splits_heads_only() -> None:
    assert get_preset("Qwen3.5-9B").shard() == ShardedGeometry(hk=16, hv=32, dk=128, dv=128, tp=1)
    shard = get_preset("Qwen3.5-9B").shard(2)
    assert (shard.hk, shard.hv, shard.dk, shard.dv, shard.group) == (8, 16, 128, 128, 2)


@pytest.mark.parametrize("tp", [0, -1, 3, 32])
def test_shard_that_does_not_divide(tp: int) -> None:
    with pytest.raises(ValueError, match=r"HK 16, HV 32.*sizes that do: 1, 2, 4, 8, 16$"):
        get_preset("Qwen3.5-9B").shard(tp)


@pytest.mark.parametrize("name", ["LFM2-1.2B", "Falcon-Mamba-7B"])
def test_families_without_heads_cannot_be_split(name: str) -> None:
    assert get_preset(name).tp_sizes() == ()
    with pytest.raises(ValueError, match="no key and value heads"):
        get_preset(name).shard()


def test_mamba2_geometry_is_that_of_b_c_and_x() -> None:
    preset = get_preset("Bamba-9B")
    assert (preset.hk, preset.hv, preset.dk, preset.dv) == (1, 128, 128, 64)


def test_beta_scale() -> None:
    assert get_preset("OLMo-Hybrid-7B").beta_scale == 2.0
    assert get_preset("Qwen3.5-9B").beta_scale == 1.0


def test_every_record_holds_together() -> None:
    presets = load_presets()
    raw = json.loads(resources.files("bole_codegen.presets").joinpath("models.json").read_text(encoding="utf-8"))
    assert len({name.lower() for name in presets}) == len(raw), "names differ by more than case"
    for preset in presets.values():
        assert preset.sources, preset.name
        assert 0 < preset.recurrent_layers <= preset.layers
        assert preset.state_dtype in ("fp32", "bf16", "fp16")
        if preset.hk is None:
            continue
        whole = preset.shard()
        assert whole.hv % whole.hk == 0, preset.name
        assert whole.hv * whole.dv * whole.dk * 4 == preset.raw["state_bytes_fp32"], preset.name
        # The record lists the power-of-two sizes that do not divide; they must be those that shard() refuses.
        uneven = {tp for sizes in preset.raw.get("tp_uneven", {}).values() for tp in sizes}
        refused = {2, 4, 8, 16} - set(preset.tp_sizes())
        assert uneven == refused, preset.name
