"""Every model of the presets: its recurrent layer resolves to a family and runs with its geometry and its gates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bole_testing.cases.base import Inputs, Setup, dense_tree
from bole_testing.cases.checks import check_commit, check_verify
from bole_testing.families import family_inputs

from bole_codegen.presets import ModelPreset, load_presets
from bole_runtime import commit, set_backend, verify
from bole_runtime.families import get_family, lightning_log_decay, retention_log_decay

FP32 = Setup(verify, commit, torch.device("cpu"), torch.bfloat16, torch.float32, "lossless")
PRESETS = load_presets()
#: The gate formulas of the records, and what they are in Bole: gate mode and floats.
FORMULAS: dict[tuple[str, str], tuple[str, dict[str, float]]] = {
    ("gdn", "-exp(A_log)*softplus(a+dt_bias)"): ("raw", {}),
    ("kda", "-exp(A_log)*softplus(f+dt_bias)"): ("raw", {}),
    ("kda", "lb*sigmoid(exp(A_log)*(f+dt_bias))"): ("raw", {"lower_bound": -5.0}),
    ("mamba2", "-exp(A_log)*dt, dt=softplus(dt_raw+dt_bias) clamped to dt_limit"): ("raw", {"dt_max": float("inf")}),
    ("lightning", "-slope[h]*(1-layer/(L-1)+1e-5)"): ("ready", {}),
    ("lightning", "-slope[h]"): ("ready", {}),
    ("rwkv7", "-exp(-0.5)*sigmoid(w)"): ("raw", {}),
}


@pytest.fixture(autouse=True)
def _torch_backend():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    set_backend("torch")
    yield
    set_backend(None)
    torch.set_num_threads(threads)


def _inputs(preset: ModelPreset, tp: int = 1) -> Inputs:
    """Return inputs of a layer in the model's own gate form."""
    shard = preset.shard(tp)
    spec = get_family(preset.family)
    formula = preset.gate["log_decay"]
    mode, floats = FORMULAS[preset.family, formula]
    gates: dict[str, Any] = dict(floats)
    if "lower_bound" in gates:
        assert gates["lower_bound"] == preset.gate["lb"]
    if preset.family in ("gdn", "kda"):
        gates["beta_scale"] = preset.beta_scale
    if preset.family == "lightning":
        layer, layers = (1, preset.layers) if "layer" in formula else (None, None)
        assert preset.hv is not None
        gates["g"] = lightning_log_decay(preset.hv, layer, layers)[: shard.hv]
    tree = dense_tree(FP32, [[-1, 0, 0, 1]])
    return family_inputs(
        FP32, spec, tree, heads=(shard.hk, shard.hv), dims=(shard.dk, shard.dv), mode=mode, slots=[0], pool_slots=1,
        gates=gates,
    )  # fmt: skip


def _names(*families: str) -> list[str]:
    return [p.name for p in PRESETS.values() if p.family in families]


def test_the_presets_hold_these_families_and_no_other() -> None:
    served = {"gdn", "kda", "lightning", "mamba2", "rwkv7"}
    assert {p.family for p in PRESETS.values()} == served | {"mamba1", "short_conv"}
    assert {family for family, _ in FORMULAS} == served


@pytest.mark.parametrize("name", _names("gdn", "kda", "lightning", "mamba2", "rwkv7"))
def test_a_layer_of_the_model(name: str) -> None:
    preset = PRESETS[name]
    sizes = [tp for tp in preset.tp_sizes() if tp <= 8]
    # The whole layer is up to 256 heads; a shard of it has every head dim and the ratio of the heads.
    inputs = _inputs(preset, max(sizes))
    assert inputs.state.shape[1:] == (inputs.v.shape[2], preset.dv, preset.dk)
    check_commit(FP32, inputs, check_verify(FP32, inputs), [3])


@pytest.mark.parametrize("name", ["OLMo-Hybrid-7B", "Kimi-K3", "Nemotron-3-Nano-4B", "Jet-Nemotron-2B"])
def test_a_whole_layer(name: str) -> None:
    # Heads that are no power of two, dk != dv, a head size of 80.
    inputs = _inputs(PRESETS[name])
    check_commit(FP32, inputs, check_verify(FP32, inputs), [3])


@pytest.mark.parametrize("name", _names("mamba1"))
def test_mamba1_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match="'mamba1' is outside the supported form: its decay depends on channel and"):
        get_family(PRESETS[name].family)


def test_retention_log_decay() -> None:
    decay = retention_log_decay(3)
    assert decay.exp().tolist() == pytest.approx([1 - 2**-5, 1 - 2**-6, 1 - 2**-7], rel=1e-15)


def test_lightning_log_decay() -> None:
    # The records state the strongest decay of the first lightning layer of MiniMax-Text-01: -0.917.
    decay = lightning_log_decay(64, 0, 80)
    assert decay.shape == (64,)
    assert decay.min().item() == pytest.approx(PRESETS["MiniMax-Text-01"].gate["range"][0], abs=1e-3)
    assert lightning_log_decay(32).min().item() == pytest.approx(PRESETS["MiniCPM-SALA"].gate["range"][0], abs=1e-4)
    for layer, layers in ((1, None), (None, 4), (4, 4), (-1, 4), (0, 1)):
        with pytest.raises(ValueError, match="layer, layers: expected 0 <= layer < layers"):
            lightning_log_decay(8, layer, layers)
