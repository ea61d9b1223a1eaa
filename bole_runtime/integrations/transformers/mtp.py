"""A head that predicts further tokens (MTP), and the drafter that proposes trees with it.

The head is that of DeepSeek-V3 (arXiv 2412.19437, section 2.2), which Qwen3-Next and Qwen3.5 ship under ``mtp.``: the
model's hidden state of a token and the embedding of the next one, each normalised, go through one projection and one
decoder layer of the model's own kind; the model's head makes of it what comes after. Applied to its own output it goes
on to the token after that.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from bole_runtime.integrations.transformers.draft import Proposal, Trie
from bole_runtime.integrations.transformers.model import library

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

    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor, cache: Any = None, start: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Predict what follows ``tokens``.

        Args:
            hidden: [B, n, H], of the token before each of ``tokens``: the model's last hidden state, or this head's.
            tokens: int64 [B, n].
            cache: of this head, extended by n; None where nothing came before.
            start: tokens that the cache holds.

        Returns:
            Hidden states [B, n, H], and logits of the token after each of ``tokens``, [B, n, V].
        """
        model = self._shared.model
        text = model.get_decoder()
        count = tokens.shape[1]
        both = (self.norm_embedding(text.embed_tokens(tokens)), self.norm_hidden(hidden))
        x = self.project(torch.cat(both, -1))
        positions = torch.arange(start, start + count, device=tokens.device).expand(tokens.shape[0], -1)
        seen = torch.arange(start + count, device=tokens.device) <= positions[0, :, None]
        mask = seen[None, None]
        # Its own: the model's may have been set to another since.
        if self.block.self_attn.config._attn_implementation == "eager":
            mask = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill_(~mask, torch.finfo(x.dtype).min)
        # Qwen3.5 has a position for time, height and width each: of text they are one.
        turned = positions.expand(3, -1, -1) if hasattr(text.rotary_emb, "mrope_section") else positions
        x = self.block(
            x, position_embeddings=text.rotary_emb(x, turned), attention_mask=mask, position_ids=positions,
            cache=cache, use_cache=cache is not None,
        )  # fmt: skip
        x = self.norm(x)
        return x, model.get_output_embeddings()(x)


class MtpDrafter:
    """Proposes with an :class:`MtpHead`: a chain of its most probable tokens, with the next most probable as siblings.

    :class:`~bole_runtime.integrations.transformers.TreeDecoder` hands it the model's hidden states of committed tokens,
    so each round costs one pass of the head over the new ones and one a further token of the chain.

    Args:
        head: in eval mode.
        depth: tokens of the chain.
        width: tokens at each step, the one of the chain included.

    Raises:
        ValueError: ``depth`` or ``width`` is below 1.
    """

    def __init__(self, head: MtpHead, depth: int = 4, width: int = 2) -> None:
        for name, value in (("depth", depth), ("width", width)):
            if value < 1:
                raise ValueError(f"{name}: {value} is not allowed; allowed: 1 or more")
        self.head, self.depth, self.width = head, depth, width

    def begin(self, rows: int) -> MtpSession:
        """Start with ``rows`` new texts."""
        return MtpSession(self, rows)


class MtpSession:
    """The texts of one batch: caches of the head, and hidden states that have not been through it."""

    def __init__(self, drafter: MtpDrafter, rows: int) -> None:
        self._drafter = drafter
        self._rows = [_Row() for _ in range(rows)]

    def observe(self, row: int, hidden: torch.Tensor) -> None:
        """Take the hidden states [n, H] of the next n committed tokens of a text."""
        self._rows[row].hidden.append(hidden)

    @torch.no_grad()
    def propose(self, row: int, context: Sequence[int], budget: int) -> Proposal:
        """Return the tree for a text whose last token, the root, has not been through the model yet."""
        state, trie, drafter = self._rows[row], Trie(budget), self._drafter
        if not state.hidden:
            return trie.proposal()
        hidden = torch.cat(state.hidden)[None]
        device, count = hidden.device, hidden.shape[1]
        known = torch.tensor([list(context[state.done + 1 : state.done + 1 + count])], device=device)
        x, logits = drafter.head(hidden, known, state.cache, state.done)
        state.done, state.hidden = state.done + count, []
        x, logits, node, drafted = x[:, -1:], logits[:, -1], -1, 0
        for step in range(drafter.depth):
            best = logits[0].topk(min(drafter.width, logits.shape[-1])).indices.tolist()
            made = [trie.child(node, token) for token in best]
            node = made[0]
            if trie.full or step + 1 == drafter.depth:
                break
            x, logits = drafter.head(x, torch.tensor([best[:1]], device=device), state.cache, state.done + drafted)
            logits, drafted = logits[:, -1], drafted + 1
        state.drop(drafted)
        return trie.proposal()


class _Row:
    """One text: the head's cache, tokens in it, and hidden states that have not been through the head."""

    def __init__(self) -> None:
        self.cache: Any = library().DynamicCache()
        self.done = 0
        self.hidden: list[torch.Tensor] = []

    def drop(self, drafted: int) -> None:
        """Take drafted tokens out of the cache."""
        if drafted:
            layer = self.cache.layers[0]
            layer.keys, layer.values = layer.keys[:, :, :-drafted], layer.values[:, :, :-drafted]
