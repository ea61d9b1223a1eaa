"""A transformers model whose recurrent layers Bole runs: which models fit, prefill, and the forward over trees."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bole_runtime.integrations.transformers.cache import TreeCache
from bole_runtime.integrations.transformers.mixers import ATTENTION, POINTWISE, RECURRENT
from bole_runtime.state.round import Round

#: Implementations of attention that take any mask.
IMPLEMENTATIONS = ("eager", "sdpa")


def library() -> Any:
    """Return the transformers package.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError("transformers is not installed; pip install '.[models]' in a checkout brings it") from error


@dataclass(frozen=True)
class Prefilled:
    """What a prompt leaves behind.

    Attributes:
        logits: [1, V], after the last token.
        hidden: [P, H], what the head gets, of every token.
        states: recurrent states, one [HV, dk, dv] a recurrent layer.
        conv_states: one [C, W - 1] a recurrent layer.
        keys: one [1, heads, P, D] an attention layer.
        values: likewise.
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    states: list[torch.Tensor]
    conv_states: list[torch.Tensor | None]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class HybridModel:
    """A causal language model of transformers, seen as attention layers, recurrent layers, and the rest.

    Everything but the convolution and the recurrence is the model's own: embeddings, projections, norms, attention,
    experts, head. In a forward over trees the recurrent modules' ``forward`` is replaced and put back afterwards, so a
    model serves one call at a time.

    Attributes:
        model: as given.
        text: its decoder.
        recurrent: index of each recurrent layer.
        attention: index of each attention layer.
        geometries: of the recurrent layers.
        vocabulary: columns of the logits.
    """

    def __init__(self, model: Any) -> None:
        """Look at every layer of a model.

        Args:
            model: ``Qwen3NextForCausalLM``, ``Qwen3_5ForCausalLM``, ``Qwen3_5MoeForCausalLM``,
                ``KimiLinearForCausalLM``, ``NemotronHForCausalLM`` or a model with the same layers, in eval mode.

        Raises:
            ImportError: transformers is not installed.
            TypeError: not a model of transformers with a language-model head.
            ValueError: layers, an activation or an implementation of attention that cannot be used, named.
        """
        transformers = library()
        if not isinstance(model, transformers.PreTrainedModel):
            raise TypeError(f"model: expected a transformers model, got {type(model).__name__}")
        self.model = model
        self.text: Any = model.get_decoder()
        self.head: Any = model.get_output_embeddings()
        if self.head is None or not hasattr(self.text, "layers"):
            raise TypeError(f"model: {type(model).__name__} has no language-model head over a stack of layers")
        if model.training:
            raise ValueError("model: in training mode; call model.eval() first")
        self.config: Any = self.text.config
        found, self.attention = _sorted_layers(self.text.layers)
        self.recurrent = list(found)
        self.modules: list[Any] = list(found.values())
        self._check_settings()
        self.mixers = [RECURRENT[type(m).__name__] for m in self.modules]
        self.geometries = [mixer.geometry(m) for mixer, m in zip(self.mixers, self.modules, strict=True)]
        self.vocabulary = int(getattr(self.head, "out_features", None) or self.head.weight.shape[0])

    def _check_settings(self) -> None:
        act = {m.activation for m in self.modules} - {"silu", "swish"}
        if act:
            raise ValueError(f"model: activation {act.pop()!r} of a convolution is not allowed; allowed: silu, swish")
        used = self.config._attn_implementation
        if self.attention and used not in IMPLEMENTATIONS:
            raise ValueError(
                f"model: attn_implementation = {used!r} takes no ancestor mask; allowed: {', '.join(IMPLEMENTATIONS)}"
            )
        devices = {str(p.device) for p in (*self.text.parameters(), *self.head.parameters())}
        if len(devices) > 1:
            raise ValueError(f"model: is spread over {', '.join(sorted(devices))}; allowed: one device")

    @property
    def device(self) -> torch.device:
        """Where the inputs go."""
        where: torch.device = self.text.get_input_embeddings().weight.device
        return where

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden states."""
        made: torch.dtype = self.text.get_input_embeddings().weight.dtype
        return made

    @torch.no_grad()
    def prefill(self, tokens: list[int]) -> Prefilled:
        """Read a prompt with the model's own forward.

        Args:
            tokens: of the prompt, one or more.
        """
        cache = library().DynamicCache(config=self.config)
        ids = torch.tensor([tokens], device=self.device)
        # All ones and no mask at all are the same to the model; positions count from 0.
        hidden = self.text(input_ids=ids, cache=cache, use_cache=True).last_hidden_state
        layers = cache.layers
        states = [
            s if mixer.layout == "dk_dv" else s.transpose(-1, -2)
            for mixer, s in zip(self.mixers, (layers[n].recurrent_states[0][0] for n in self.recurrent), strict=True)
        ]
        convs = [
            layers[n].conv_states[0][0, :, 1 - g.conv_width :]
            for n, g in zip(self.recurrent, self.geometries, strict=True)
        ]
        keys, values = ([getattr(layers[n], name) for n in self.attention] for name in ("keys", "values"))
        return Prefilled(self.head(hidden[:, -1]), hidden[0], states, convs, keys, values)

    @torch.no_grad()
    def verify(self, tokens: torch.Tensor, rnd: Round, cache: TreeCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all nodes of all trees through the model. Their keys and values are appended to the cache.

        Args:
            tokens: int64 [B, N]; padding nodes hold any token of the vocabulary.
            rnd: over the trees, in the capacities of ``tokens``.
            cache: of the same rows.

        Returns:
            Logits after every node, [B, N, V], and what the head got, [B, N, H].
        """
        mask = cache.mask(rnd.tree)
        if self.config._attn_implementation == "eager":
            mask = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(
                ~mask, torch.finfo(self.dtype).min
            )
        with self._replaced(rnd):
            hidden = self.text(
                input_ids=tokens,
                attention_mask={"full_attention": mask, "linear_attention": None},
                position_ids=cache.positions(rnd.tree),
                cache=cache,
                use_cache=True,
            ).last_hidden_state
        return self.head(hidden), hidden

    @contextmanager
    def _replaced(self, rnd: Round) -> Iterator[None]:
        # A forward that someone else has put on a module (hooks of accelerate) comes back as it was.
        kept = [module.__dict__.get("forward") for module in self.modules]
        try:
            for n, module in enumerate(self.modules):
                module.forward = self._forward_of(n, rnd)
            yield
        finally:
            for module, forward in zip(self.modules, kept, strict=True):
                if forward is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.forward = forward

    def _forward_of(self, n: int, rnd: Round) -> Callable[..., torch.Tensor]:
        module, mixer, geometry = self.modules[n], self.mixers[n], self.geometries[n]

        def forward(hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
            return mixer.forward(module, geometry, rnd, n, hidden_states)

        return forward


def _sorted_layers(layers: Any) -> tuple[dict[int, Any], list[int]]:
    """Return the recurrent modules by the index of their layers, and the indices of attention layers.

    Raises:
        ValueError: layers that are neither, named; or none is recurrent.
    """
    recurrent: dict[int, Any] = {}
    attention: list[int] = []
    unknown: dict[str, list[int]] = {}
    for n, layer in enumerate(layers):
        parts = {type(child).__name__: child for child in layer.children()}
        mixer = next((name for name in parts if name in RECURRENT), None)
        if mixer is not None:
            recurrent[n] = parts[mixer]
        elif any(name in ATTENTION for name in parts):
            attention.append(n)
        elif not any(name in POINTWISE for name in parts):
            # Layers of transformers hold their mixer first.
            unknown.setdefault(next(iter(parts), type(layer).__name__), []).append(n)
    if unknown:
        shown = "; ".join(f"{name} in layers {', '.join(map(str, which))}" for name, which in unknown.items())
        raise ValueError(f"model: not supported: {shown}; allowed: {', '.join((*RECURRENT, *ATTENTION))}")
    if not recurrent:
        raise ValueError(f"model: has no recurrent layer; allowed: {', '.join(RECURRENT)}")
    return recurrent, attention
