"""Training of the model and its MTP head, for a given time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from bole_runtime.integrations.transformers import MtpHead
from hybrid.text import draw

#: Weight of each further token's loss beside that of the next one.
FURTHER = 0.3


def build(tiny: bool, device: torch.device) -> tuple[Any, MtpHead]:
    """Return a Qwen3.5-like model over bytes, three Gated DeltaNet layers to one of attention, and a head."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    wide, layers, heads, size = (64, 4, 1, 64) if tiny else (512, 8, 4, 128)
    config = Qwen3_5TextConfig(
        vocab_size=256, hidden_size=wide, intermediate_size=3 * wide, num_hidden_layers=layers,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * (layers // 4),
        num_attention_heads=wide // 64, num_key_value_heads=1, head_dim=64, linear_num_key_heads=heads,
        linear_num_value_heads=2 * heads, linear_key_head_dim=size, linear_value_head_dim=size,
        linear_conv_kernel_dim=4, tie_word_embeddings=False, pad_token_id=None, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = Qwen3_5ForCausalLM(config).to(device)
    return model, MtpHead(model)


def losses(model: Any, head: MtpHead, ids: torch.Tensor, further: int) -> list[torch.Tensor]:
    """Return the mean cross-entropy of the next token, and of ``further`` tokens after it by the head."""
    hidden = model.get_decoder()(input_ids=ids).last_hidden_state
    found = [_entropy(model.get_output_embeddings()(hidden[:, :-1]), ids[:, 1:])]
    for step in range(1, further + 1):
        # What the head has for the token before each of these, and those.
        hidden, logits = head(hidden[:, :-1], ids[:, step:])
        found.append(_entropy(logits[:, :-1], ids[:, step + 1 :]))
    return found


def _entropy(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def train(
    model: Any, head: MtpHead, text: torch.Tensor, *, seconds: float, rows: int, length: int, further: int = 2,
    rate: float = 1e-3, seed: int = 0, tell: Callable[[str], None] = print,
) -> list[float]:  # fmt: skip
    """Train for a given time, the rate rising, then falling as a cosine of it.

    Returns:
        Last losses, nats a token: the next, and each further one.
    """
    device = next(model.parameters()).device
    parameters = [*model.parameters(), *head.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.05)
    generator = torch.Generator().manual_seed(seed)
    begun, step, told, last = time.monotonic(), 0, 0.0, [math.nan]
    model.train()
    head.train()
    while (part := (time.monotonic() - begun) / seconds) < 1.0:
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50) * (0.05 + 0.475 * (1.0 + math.cos(math.pi * part)))
        ids = draw(text, rows, length, generator).to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            found = losses(model, head, ids, further)
        total = found[0] + FURTHER * sum(found[1:], torch.zeros((), device=device))
        optimiser.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        step += 1
        if time.monotonic() - told > 10 or step == 1:
            told, last = time.monotonic(), [float(x.detach()) for x in found]
            tell(f"{told - begun:5.0f} s  step {step}  nats a byte: {', '.join(f'{x:.3f}' for x in last)}")
    model.eval()
    head.eval()
    return [float(x.detach()) for x in found] if step else last
