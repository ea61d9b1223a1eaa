"""The layer against transformers' modules, run token by token along every path."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bole_testing.cases.base import NAN, random_parents
from bole_testing.close import assert_close, assert_same_bits
from bole_testing.conv import conv_tree

from bole_runtime.layers import GatedDeltaNet, Mamba2, commit_layers

pytest.importorskip("transformers")

HIDDEN, HK, HV, DK, DV = 32, 2, 4, 8, 12


def _next(seed: int) -> tuple[Any, Any, str]:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = modeling.Qwen3NextConfig(**_sizes())
    torch.manual_seed(seed)
    return config, modeling.Qwen3NextGatedDeltaNet(config, 0), "key_heads"


def _qwen35(seed: int) -> tuple[Any, Any, str]:
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    config = modeling.Qwen3_5TextConfig(**_sizes())
    torch.manual_seed(seed)
    return config, modeling.Qwen3_5GatedDeltaNet(config, 0), "parts"


def _sizes() -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN, "linear_num_key_heads": HK, "linear_num_value_heads": HV, "linear_key_head_dim": DK,
        "linear_value_head_dim": DV, "linear_conv_kernel_dim": 4, "num_hidden_layers": 1,
        "layer_types": ["linear_attention"], "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "vocab_size": 32, "intermediate_size": 32,
    }  # fmt: skip


MODELS = {"qwen3_next": _next, "qwen3_5": _qwen35}


def layer_of(module: Any, layout: str) -> GatedDeltaNet:
    return GatedDeltaNet(
        HK, HV, DK, DV, module.conv1d.weight.squeeze(1), module.A_log, module.dt_bias, module.norm.weight,
        norm_eps=module.norm.variance_epsilon, layout=layout,
    )  # fmt: skip


def project(module: Any, layout: str, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if layout == "key_heads":
        return module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
    qkvz = torch.cat((module.in_proj_qkv(hidden), module.in_proj_z(hidden)), -1)
    return qkvz, torch.cat((module.in_proj_b(hidden), module.in_proj_a(hidden)), -1)


def states(cache: Any, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states of a cache in Bole's layouts, [C, W] and [HV, dv, dk]."""
    conv, recurrent = cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0]
    return conv[0].clone(), (recurrent[0].transpose(1, 2) if transposed else recurrent[0]).clone()


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_every_path(name: str) -> None:
    config, module, layout = MODELS[name](3)
    cache_class = pytest.importorskip("transformers").DynamicCache
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    layer = layer_of(module, layout)

    def run(hidden: torch.Tensor, **pools: Any) -> Any:
        return layer.verify(*project(module, layout, hidden), **pools)

    compare(config, module, cache_class, run, transposed=True)


def compare(config: Any, module: Any, cache_class: Any, run: Callable[..., Any], transposed: bool) -> None:
    """Compare outputs and both states of every path with the module's own steps.

    Args:
        config: of the model.
        module: its layer.
        cache_class: of its states.
        run: the layer under test, up to ``out_proj``.
        transposed: whether the module keeps a recurrent state as [dk, dv].
    """
    rng = random.Random(7)
    prompt = torch.randn(1, 6, HIDDEN)
    cache = cache_class(config=config)
    module(prompt, cache)
    nodes = 10
    tree = conv_tree([random_parents(rng, nodes, roots=0.2)], False)
    hidden = torch.randn(1, nodes, HIDDEN)
    conv_state, state = states(cache, transposed)
    conv_pool, pool = torch.full((2, *conv_state.shape), NAN), torch.full((2, *state.shape), NAN)
    conv_pool[1], pool[1] = conv_state, state
    slots = torch.tensor([1])
    before = conv_pool.clone(), pool.clone()
    made, factors = run(hidden, conv_state=conv_pool, state=pool, slots=slots, tree=tree)
    assert_same_bits("convolution state", conv_pool, before[0])
    assert_same_bits("state", pool, before[1])
    out = module.out_proj(made)
    for node in range(nodes):
        single = copy.deepcopy(cache)
        for step in tree.path(0, node):
            want = module(hidden[:, step : step + 1], single)
        assert_close(f"node {node}", out[:, node], want[:, 0], 1e-5)
        if node in (0, nodes // 2, nodes - 1):
            pools = conv_pool.clone(), pool.clone()
            commit_layers([pools[0]], [pools[1]], slots, [factors], torch.tensor([node]))
            wanted = states(single, transposed)
            assert_close("convolution state", pools[0][1], wanted[0], 1e-6)
            assert_close("state", pools[1][1], wanted[1], 5e-6)


@torch.no_grad()
def test_every_path_of_nemotron_h() -> None:
    modeling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    cache_class = pytest.importorskip("transformers").DynamicCache
    config = modeling.NemotronHConfig(
        hidden_size=HIDDEN, mamba_num_heads=4, mamba_head_dim=12, ssm_state_size=8, n_groups=2, chunk_size=4,
        time_step_min=0.0, layer_types=["mamba"], num_hidden_layers=1, vocab_size=32, conv_kernel=4,
    )  # fmt: skip
    torch.manual_seed(5)
    module = modeling.NemotronHMamba2Mixer(config, 0)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    layer = Mamba2(
        4, 2, 12, 8, module.conv1d.weight.squeeze(1), module.conv1d.bias, module.A_log, module.dt_bias, module.D,
        module.norm.weight, norm_groups=2, norm_eps=module.norm.variance_epsilon,
    )  # fmt: skip

    def run(hidden: torch.Tensor, **pools: Any) -> Any:
        return layer.verify(module.in_proj(hidden), **pools)

    compare(config, module, cache_class, run, transposed=False)
