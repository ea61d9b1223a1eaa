"""A head that predicts further tokens (MTP).

The head is that of DeepSeek-V3 (arXiv 2412.19437, section 2.2), which Qwen3-Next and Qwen3.5 ship under ``mtp.``: the
model's hidden state of a token and the embedding of the next one, each normalised, go through one projection and one
decoder layer of the model's own kind; the model's head makes of it what comes after. Applied to its own output it goes
on to the token after that.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

#: Models whose attention layers stand alone behind embeddings of positions.
MODELS = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")


class _Shared:
    """The model behind a head: no submodule, since its parameters are not the head's; a copy of a head has the same."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __deepcopy__(self, memo: object) -> _Shared:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("an MtpHead is not saved with its model; save head.state_dict()")


class MtpHead(torch.nn.Module):
    """One attention layer behind the hidden states of a model.

    Embedding, final norm and head are the model's and are not parameters of this module.

    Args:
        model: with attention layers, such as ``Qwen3_5ForCausalLM``.
        layer: index of an attention layer whose kind is used; default, the first one.

    Raises:
        ValueError: a model of another kind, or the layer is no attention layer.
    """

    def __init__(self, model: Any, layer: int | None = None) -> None:
        super().__init__()
        text = model.get_decoder()
        if type(model).__name__ not in MODELS:
            raise ValueError(f"model: {type(model).__name__} is not supported; allowed: {', '.join(MODELS)}")
        config = copy.deepcopy(text.config)
        kinds = list(getattr(config, "layer_types", ()))
        if layer is None:
            layer = kinds.index("full_attention") if "full_attention" in kinds else -1
        if not 0 <= layer < len(kinds) or kinds[layer] != "full_attention":
            raise ValueError(f"layer: {layer} is no attention layer of the model; allowed: where layer_types says so")
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        norm = type(text.norm)
        size = config.hidden_size
        self.norm_embedding = norm(size, eps=config.rms_norm_eps)
        self.norm_hidden = norm(size, eps=config.rms_norm_eps)
        self.project = torch.nn.Linear(2 * size, size, bias=False)
        self.block = type(text.layers[layer])(config, 0)
        self.norm = norm(size, eps=config.rms_norm_eps)
        self.to(text.norm.weight)
        self._shared = _Shared(model)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Predict what follows each token of texts that begin here.

        Args:
            hidden: [B, n, H], of the token before each of ``tokens``: the model's last hidden state, or this head's.
            tokens: int64 [B, n].

        Returns:
            Hidden states [B, n, H], and logits of the token after each of ``tokens``, [B, n, V].
        """
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.step(hidden, tokens, steps.expand(tokens.shape[0], -1), (steps <= steps[:, None])[None, None])
        return x, self.logits(x)

    def step(
        self, hidden: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: Any = None
    ) -> torch.Tensor:
        """Go on with texts.

        Args:
            hidden: [B, n, H]; as for :meth:`forward`.
            tokens: int64 [B, n].
            positions: int64 [B, n], of the tokens in their texts.
            mask: bool [B, 1, n, columns], or of one batch for all: what each token attends to.
            cache: with a method ``update(keys, values, layer, ...)`` that returns those of all columns. None: those of
                the tokens alone.

        Returns:
            Hidden states [B, n, H].
        """
        text = self._shared.model.get_decoder()
        both = (self.norm_embedding(text.embed_tokens(tokens)), self.norm_hidden(hidden))
        x = self.project(torch.cat(both, -1))
        # Its own: the model's may have been set to another since.
        if self.block.self_attn.config._attn_implementation == "eager":
            mask = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill_(~mask, torch.finfo(x.dtype).min)
        # Qwen3.5 has a position for time, height and width each: of text they are one.
        turned = positions.expand(3, -1, -1) if hasattr(text.rotary_emb, "mrope_section") else positions
        x = self.block(
            x, position_embeddings=text.rotary_emb(x, turned), attention_mask=mask, position_ids=positions,
            cache=cache, use_cache=cache is not None,
        )  # fmt: skip
        made: torch.Tensor = self.norm(x)
        return made

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the model's head makes of this head's hidden states."""
        made: torch.Tensor = self._shared.model.get_output_embeddings()(hidden)
        return made
