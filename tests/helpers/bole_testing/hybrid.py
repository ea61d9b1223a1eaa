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


KIMI: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "layer_types": SIZES["layer_types"], "mlp_layer_types": ["dense", "sparse", "sparse"], "num_attention_heads": 2,
    "num_key_value_heads": 2, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_experts_per_tok": 2, "num_local_experts": 4, "linear_head_dim": 12, "linear_num_heads": 3,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"], "chunk_size": 8,
    "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 12, "n_groups": 2, "n_routed_experts": 4,
    "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
}  # fmt: skip
#: Configuration, model and sizes by the name of the module.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**SIZES, **EXPERTS, "mlp_only_layers": [0]}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", SIZES),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**SIZES, **EXPERTS}),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM", KIMI),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM", NEMOTRON),
}


def build(name: str, attention: str = "sdpa", seed: int = 0) -> Any:
    """Return one of :data:`MODELS`, which never ends a text by itself."""
    module = pytest.importorskip(
        f"transformers.models.{name}", reason="needs transformers with this model: pip install '.[models]'"
    )
    config_class, model_class, sizes = MODELS[name]
    ids = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}
    config = getattr(module, config_class)(**{**sizes, **ids})
    config._attn_implementation = attention
    torch.manual_seed(seed)
    return scaled(getattr(module, model_class)(config))


def plain(model: Any, prompt: list[int], new: int, **options: Any) -> list[int]:
    """Return prompt and new tokens of the model's own greedy decoding."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0, **options}
    tokens: list[int] = model.generate(ids, max_new_tokens=new, **options)[0].tolist()
    return tokens
