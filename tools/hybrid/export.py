"""A trained model and its MTP head as a checkpoint folder that engines load: the names of released Qwen3.5 files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from bole_runtime.integrations.transformers import MtpHead

#: Parameter of the head -> name in a checkpoint.
HEAD = {
    "project.": "mtp.fc.",
    "norm_embedding.": "mtp.pre_fc_norm_embedding.",
    "norm_hidden.": "mtp.pre_fc_norm_hidden.",
    "block.": "mtp.layers.0.",
    "norm.": "mtp.norm.",
}
TEXT = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "layer_types", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_bias",
        "rope_parameters", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
        "linear_num_key_heads", "linear_num_value_heads", "tie_word_embeddings")  # fmt: skip


def names(model: Any, head: MtpHead) -> dict[str, torch.Tensor]:
    """Return every tensor under the name that it has in a checkpoint."""
    found = {}
    for name, tensor in model.state_dict().items():
        found[name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name] = tensor
    for name, tensor in head.state_dict().items():
        ours = next(part for part in HEAD if name.startswith(part))
        found[HEAD[ours] + name[len(ours) :]] = tensor
    return found


def configuration(model: Any) -> dict[str, Any]:
    """Return config.json: the text model inside a vision model of one small layer, which has no weights."""
    config = model.config.to_dict()
    text = {name: config[name] for name in TEXT} | {
        "model_type": "qwen3_5_text", "torch_dtype": "bfloat16", "full_attention_interval": 4, "attn_output_gate": True,
        "partial_rotary_factor": config["rope_parameters"]["partial_rotary_factor"], "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
    }  # fmt: skip
    wide = config["hidden_size"]
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, "text_config": text,
        # Bytes that no text has.
        "image_token_id": 252, "video_token_id": 253, "vision_start_token_id": 254, "vision_end_token_id": 255,
        "vision_config": {
            "model_type": "qwen3_5", "depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 1,
            "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "out_hidden_size": wide, "num_position_embeddings": 256, "deepstack_visual_indexes": [],
        },
    }  # fmt: skip


def export(model: Any, head: MtpHead, prompts: list[list[int]], folder: Path) -> None:
    """Write config.json, model.safetensors in bf16 (norms, gates and decays as they are) and prompts.json."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    kept = ("A_log", "dt_bias")
    tensors = {
        name: (t.float() if name.endswith(kept) else t.bfloat16()).contiguous().cpu()
        for name, t in names(model, head).items()
    }
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(configuration(model), indent=2) + "\n")
    (folder / "prompts.json").write_text(json.dumps(prompts))
