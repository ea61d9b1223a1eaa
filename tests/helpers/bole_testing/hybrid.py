"""Tiny hybrid models of transformers with random weights, scaled so that what they say varies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

VOCABULARY = 48
SIZES: dict[str, Any] = {
    "hidden_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": VOCABULARY,
    "intermediate_size": 48,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip


def scaled(model: Any) -> Any:
    """Make a model's weights large enough that its output depends on the whole text."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(20 if "lm_head" in name else 8)
    return model.eval()


def build(name: str, attention: str = "sdpa", seed: int = 0, **changes: Any) -> Any:
    """Return a model: ``qwen3_next`` (a dense layer, experts elsewhere), ``qwen3_5`` or ``qwen3_5_moe``."""
    module = pytest.importorskip(
        f"transformers.models.{name}.modeling_{name}", reason="needs transformers with this model: bole[models]"
    )
    sizes = {**SIZES, **(EXPERTS if name != "qwen3_5" else {}), **changes}
    if name == "qwen3_next":
        config, kind = module.Qwen3NextConfig(**sizes, mlp_only_layers=[0]), module.Qwen3NextForCausalLM
    else:
        moe = "Moe" if name.endswith("moe") else ""
        configs = __import__(f"transformers.models.{name}", fromlist=["x"])
        config = getattr(configs, f"Qwen3_5{moe}TextConfig")(**sizes)
        kind = getattr(module, f"Qwen3_5{moe}ForCausalLM")
    config._attn_implementation = attention
    torch.manual_seed(seed)
    return scaled(kind(config))


def plain(model: Any, prompt: list[int], new: int, **options: Any) -> list[int]:
    """Return prompt and new tokens of the model's own greedy decoding."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0, **options}
    tokens: list[int] = model.generate(ids, max_new_tokens=new, **options)[0].tolist()
    return tokens
