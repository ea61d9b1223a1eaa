"""The MTP head and its drafter: caches change nothing, and no drafter changes what is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bole_testing.hybrid import build, plain, scaled

from bole_runtime.integrations.transformers import MtpDrafter, MtpHead, Proposal, TreeDecoder, generate
from bole_runtime.integrations.transformers.draft import Trie

pytest.importorskip("transformers", reason="needs transformers: pip install '.[models]'")

PROMPTS = [[3, 17, 5, 9, 9, 30, 3, 17, 5], [8, 1, 2], [40]]


def head_of(model: Any) -> MtpHead:
    torch.manual_seed(5)
    head: MtpHead = scaled(MtpHead(model))
    return head


@torch.no_grad()
def from_scratch(head: MtpHead, model: Any, context: list[int], depth: int, width: int, budget: int) -> Proposal:
    """Propose without any cache: the head over the whole text again for every token."""
    hidden = model.get_decoder()(input_ids=torch.tensor([context[:-1]])).last_hidden_state
    tokens, trie, node = list(context[1:]), Trie(budget), -1
    for _ in range(depth):
        out, logits = head(hidden, torch.tensor([tokens]))
        best = logits[0, -1].topk(width).indices.tolist()
        made = [trie.child(node, t) for t in best]
        node = made[0]
        if trie.full:
            break
        hidden = torch.cat([hidden, out[:, -1:]], 1)
        tokens.append(best[0])
    return trie.proposal()


class Checked(MtpDrafter):
    """Compares every proposal with one from scratch."""

    calls = 0

    def propose_for(self, row: int, context: Any, budget: int) -> Proposal:
        made = super().propose_for(row, context, budget)
        if len(context) > 1:
            (model,) = self.head._model
            want = from_scratch(self.head, model, list(context), self.depth, self.width, budget)
            assert (list(made.tokens), list(made.parents)) == (list(want.tokens), list(want.parents))
            self.calls += 1
        return made


@pytest.mark.parametrize(("name", "attention"), [("qwen3_5", "sdpa"), ("qwen3_5", "eager"), ("qwen3_next", "sdpa")])
def test_caches_change_nothing_and_drafts_do_not_either(name: str, attention: str) -> None:
    model = build(name, attention)
    drafter = Checked(head_of(model), depth=3, width=2)
    got = generate(model, PROMPTS, drafter=drafter, budget=5, max_new_tokens=12)
    for prompt, text in zip(PROMPTS, got, strict=True):
        assert list(text) == plain(model, prompt, 12)
    assert drafter.calls > 10
    # A decoder is used again: nothing of the texts before is left.
    decoder = TreeDecoder(model, drafter, budget=5, max_batch=2)
    for _ in range(2):
        rounds = list(decoder.rounds(PROMPTS[:2], max_new_tokens=6))
        assert sum(len(r.tokens[0]) for r in rounds) == 6


def test_a_head_that_knows_is_followed() -> None:
    """With drafts of the model itself in the place of the head's, whole chains are accepted."""
    model = build("qwen3_5")
    text = plain(model, PROMPTS[0], 20)

    class Knows(MtpDrafter):
        def propose_for(self, row: int, context: Any, budget: int) -> Proposal:
            super().propose_for(row, context, budget)
            ahead = text[len(context) : len(context) + 4]
            return Proposal(ahead, list(range(-1, len(ahead) - 1)))

    decoder = TreeDecoder(model, Knows(head_of(model)), budget=5)
    results = list(decoder.rounds(PROMPTS[0], max_new_tokens=20))
    assert [t for r in results for t in r.tokens[0]] == text[len(PROMPTS[0]) :]
    assert max(r.accepted[0] for r in results) == 5


def test_errors() -> None:
    model = build("qwen3_5")
    with pytest.raises(ValueError, match="layer: 0 is no attention layer"):
        MtpHead(model, layer=0)
    with pytest.raises(ValueError, match="NemotronHForCausalLM is not supported; allowed: Qwen3Next"):
        MtpHead(build("nemotron_h"))
    with pytest.raises(ValueError, match="depth: 0"):
        MtpDrafter(head_of(model), depth=0)
    with pytest.raises(TypeError, match="nor those of a HiddenDrafter"):
        TreeDecoder(model, object())  # type: ignore[arg-type]
    shared = {id(p) for p in model.parameters()}
    assert not any(id(p) in shared for p in MtpHead(model).parameters())
