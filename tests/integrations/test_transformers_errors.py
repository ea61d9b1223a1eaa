"""What is refused, and how it is said; and drafters by themselves."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from bole_runtime.integrations.transformers import PromptLookup, Proposal, TreeDecoder, generate


def test_importing_imports_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("bole_runtime.integrations")]:
        monkeypatch.delitem(sys.modules, name)
    # None makes every import of it fail.
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert importlib.import_module("bole_runtime.integrations.transformers").PromptLookup is not PromptLookup


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install '.\[models\]'"):
        TreeDecoder(object())


@pytest.mark.parametrize(
    ("context", "budget", "tokens", "parents"),
    [
        ([1, 2, 3], 8, [], []),
        ([5], 8, [], []),
        # Two occurrences of 1, 2: the later continuation first; both begin with 3.
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2], 8, [3, 5, 1, 2, 4, 1, 2], [-1, 0, 1, 2, 0, 4, 5]),
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2], 2, [3, 5], [-1, 0]),
        # The longer match wins over the later one.
        ([7, 1, 2, 9, 8, 2, 6, 7, 1, 2], 2, [9, 8], [-1, 0]),
    ],
)
def test_prompt_lookup(context: list[int], budget: int, tokens: list[int], parents: list[int]) -> None:
    got = PromptLookup(max_ngram=3, depth=4).propose(context, budget)
    assert (list(got.tokens), list(got.parents)) == (tokens, parents)


def test_prompt_lookup_limits() -> None:
    text = [1, 2, 1, 3, 1, 4, 1]
    assert list(PromptLookup(branches=2, depth=1).propose(text, 8).tokens) == [4, 3]
    assert list(PromptLookup(min_ngram=2).propose(text, 8).tokens) == []
    for options in ({"max_ngram": 0}, {"depth": 0}, {"min_ngram": 3, "max_ngram": 2}):
        with pytest.raises(ValueError, match=r"is not allowed; allowed"):
            PromptLookup(**options)


class Fixed:
    def __init__(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        self.made = Proposal(tokens, parents)

    def propose(self, context: Sequence[int], budget: int) -> Proposal:
        return self.made


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([1], [-1, 0], r"^Fixed\.propose: returned 1 tokens and 2 parents"),
        ([1, 1, 1, 1], [-1] * 4, r"^Fixed\.propose: returned 4 nodes; allowed: at most 3"),
        ([48], [-1], r"^Fixed\.propose: token 48 of node 0 is not allowed; allowed: 0 to 47"),
        ([1, 2], [-1, 1], r"^Fixed\.propose: parent 1 of node 1 is not allowed; allowed: -1 to 0"),
    ],
)
def test_bad_proposals(qwen: Any, tokens: list[int], parents: list[int], message: str) -> None:
    decoder = TreeDecoder(qwen, Fixed(tokens, parents), budget=3)
    with pytest.raises(ValueError, match=message):
        list(decoder.rounds([1, 2]))
    assert decoder.manager.free_slots == 1


def test_models_that_do_not_fit(qwen: Any) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 32}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, **sizes)).eval()
    with pytest.raises(ValueError, match=r"^model: not supported: LlamaAttention in layers 0, 1; allowed: Qwen3Next"):
        TreeDecoder(llama)
    with pytest.raises(TypeError, match=r"^model: expected a transformers model, got Linear"):
        TreeDecoder(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"^drafter: int has no method propose"):
        TreeDecoder(qwen, 3)  # type: ignore[arg-type]
    qwen.train()
    try:
        with pytest.raises(ValueError, match=r"^model: in training mode"):
            TreeDecoder(qwen)
    finally:
        qwen.eval()
    kept = qwen.config._attn_implementation
    qwen.config._attn_implementation = "flash_attention_2"
    try:
        with pytest.raises(ValueError, match=r"'flash_attention_2' takes no ancestor mask; allowed: eager, sdpa"):
            TreeDecoder(qwen)
    finally:
        qwen.config._attn_implementation = kept


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([], {}, r"^input_ids: no prompt"),
        ([[1], []], {}, r"^input_ids: prompt 1 is empty"),
        ([48], {}, r"^input_ids: 48 in prompt 0 is not allowed; allowed: 0 to 47"),
        (torch.zeros(1, 2, 3, dtype=torch.long), {}, r"^input_ids: expected shape \[P\] or \[B, P\]"),
        ([1], {"max_new_tokens": 0}, r"^max_new_tokens: 0"),
        ([1], {"seeds": [1, 2]}, r"^seeds: 2 for 1 prompts"),
        ([1], {"attention_mask": torch.ones(1, 1)}, r"^attention_mask: expected a tensor as input_ids"),
        ([1], {"budget": 512}, r"^budget: 512 is not allowed; allowed: 0 to 511"),
    ],
)
def test_bad_arguments(qwen: Any, given: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(qwen, given, **options)


@pytest.mark.parametrize("given", [torch.zeros(1, 2), "text", 3, [[1, "a"]]])
def test_bad_types(qwen: Any, given: Any) -> None:
    with pytest.raises(TypeError, match=r"^input_ids: "):
        generate(qwen, given)


def test_logits_that_cannot_be_used(qwen: Any) -> None:
    decoder = TreeDecoder(qwen)
    weight = qwen.lm_head.weight.data
    kept = weight.clone()
    try:
        weight[3] = float("nan")
        with pytest.raises(ValueError, match=r"^model: logits of prompts \[0\] have a NaN"):
            list(decoder.rounds([1, 2]))
    finally:
        weight.copy_(kept)
    assert decoder.manager.free_slots == 1
