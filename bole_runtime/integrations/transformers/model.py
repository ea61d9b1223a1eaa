"""A transformers model whose recurrent layers Bole runs: which models fit, prefill, and the forward over trees."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bole_runtime.integrations.transformers.cache import TreeCache
from bole_runtime.state import LayerGeometry
from bole_runtime.state.round import Round

#: Raw inputs of the convolution [B, N, C], z [B, N, HV, dv], b and a [B, N, HV].
Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _by_key_heads(module: Any, hidden: torch.Tensor) -> Projected:
    made = module.fix_query_key_value_ordering(module.in_proj_qkvz(hidden), module.in_proj_ba(hidden))
    q, k, v, z, b, a = made
    return torch.cat([t.flatten(2) for t in (q, k, v)], -1), z, b, a


def _by_parts(module: Any, hidden: torch.Tensor) -> Projected:
    z = module.in_proj_z(hidden).unflatten(-1, (-1, module.head_v_dim))
    return module.in_proj_qkv(hidden), z, module.in_proj_b(hidden), module.in_proj_a(hidden)


#: Recurrent layers by the name of their class, with how each projects.
RECURRENT: dict[str, Callable[[Any, torch.Tensor], Projected]] = {
    "Qwen3NextGatedDeltaNet": _by_key_heads,
    "Qwen3_5GatedDeltaNet": _by_parts,
    "Qwen3_5MoeGatedDeltaNet": _by_parts,
}
#: Attention layers that take a mask as it is given to them.
ATTENTION = ("Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention")
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
        raise ImportError("transformers is not installed; pip install 'bole[models]' brings it") from error


@dataclass(frozen=True)
class Prefilled:
    """What a prompt leaves behind.

    Attributes:
        logits: [1, V], after the last token.
        states: recurrent states, one [HV, dk, dv] a recurrent layer.
        conv_states: one [C, W - 1] a recurrent layer.
        keys: one [1, heads, P, D] an attention layer.
        values: likewise.
    """

    logits: torch.Tensor
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
            model: ``Qwen3NextForCausalLM``, ``Qwen3_5ForCausalLM``, ``Qwen3_5MoeForCausalLM`` or a model with the same
                layers, in eval mode.

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
        self.recurrent, self.attention = _sorted_layers(self.text.layers)
        self._check_settings()
        self.modules: list[Any] = [self.text.layers[n].linear_attn for n in self.recurrent]
        self.projections = [RECURRENT[type(m).__name__] for m in self.modules]
        self.geometries = [
            LayerGeometry(
                m.num_k_heads, m.num_v_heads, m.head_k_dim, m.head_v_dim, gate_mode="raw", conv_width=m.conv_kernel_size
            )
            for m in self.modules
        ]
        self.vocabulary = int(getattr(self.head, "out_features", None) or self.head.weight.shape[0])

    def _check_settings(self) -> None:
        act = self.config.hidden_act
        if act not in ("silu", "swish"):
            raise ValueError(f"model: hidden_act = {act!r} is not allowed; allowed: silu, swish")
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
        where: torch.device = self.text.embed_tokens.weight.device
        return where

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden states."""
        made: torch.dtype = self.text.embed_tokens.weight.dtype
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
        states = [layers[n].recurrent_states[0][0] for n in self.recurrent]
        convs = [
            layers[n].conv_states[0][0, :, 1 - g.conv_width :]
            for n, g in zip(self.recurrent, self.geometries, strict=True)
        ]
        keys, values = ([getattr(layers[n], name) for n in self.attention] for name in ("keys", "values"))
        return Prefilled(self.head(hidden[:, -1]), states, convs, keys, values)

    @torch.no_grad()
    def verify(self, tokens: torch.Tensor, rnd: Round, cache: TreeCache) -> torch.Tensor:
        """Run all nodes of all trees through the model. Their keys and values are appended to the cache.

        Args:
            tokens: int64 [B, N]; padding nodes hold any token of the vocabulary.
            rnd: over the trees, in the capacities of ``tokens``.
            cache: of the same rows.

        Returns:
            Logits after every node, [B, N, V].
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
                cache=cache.store,
                use_cache=True,
            ).last_hidden_state
        logits: torch.Tensor = self.head(hidden)
        return logits

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
        module, project, geometry = self.modules[n], self.projections[n], self.geometries[n]
        sizes = [geometry.key_heads * geometry.dk] * 2 + [geometry.value_heads * geometry.dv]

        def forward(hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
            raw, z, b, a = project(module, hidden_states)
            mixed = rnd.conv(n, raw, module.conv1d.weight.squeeze(1), module.conv1d.bias)
            q, k, v = mixed.split(sizes, -1)
            out = rnd.verify(
                n,
                q.unflatten(-1, (-1, geometry.dk)),
                k.unflatten(-1, (-1, geometry.dk)),
                v.unflatten(-1, (-1, geometry.dv)),
                gates={"a": a, "b": b, "A_log": module.A_log, "dt_bias": module.dt_bias},
            )
            normed = module.norm(out.reshape(-1, geometry.dv), z.reshape(-1, geometry.dv))
            made: torch.Tensor = module.out_proj(normed.reshape(*hidden_states.shape[:-1], -1))
            return made

        return forward


def _sorted_layers(layers: Any) -> tuple[list[int], list[int]]:
    """Return the indices of recurrent and of attention layers.

    Raises:
        ValueError: layers that are neither, named; or none is recurrent.
    """
    recurrent: list[int] = []
    attention: list[int] = []
    unknown: dict[str, list[int]] = {}
    for n, layer in enumerate(layers):
        parts = [type(child).__name__ for child in layer.children()]
        if type(getattr(layer, "linear_attn", None)).__name__ in RECURRENT:
            recurrent.append(n)
        elif type(getattr(layer, "self_attn", None)).__name__ in ATTENTION:
            attention.append(n)
        else:
            # Layers of transformers hold their mixer first.
            unknown.setdefault(parts[0] if parts else type(layer).__name__, []).append(n)
    if unknown:
        shown = "; ".join(f"{name} in layers {', '.join(map(str, which))}" for name, which in unknown.items())
        raise ValueError(f"model: not supported: {shown}; allowed: {', '.join((*RECURRENT, *ATTENTION))}")
    if not recurrent:
        raise ValueError(f"model: has no recurrent layer; allowed: {', '.join(RECURRENT)}")
    return recurrent, attention
