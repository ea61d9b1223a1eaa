"""The MTP head and its drafter: caches change nothing, and no drafter changes what is written."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from bole_testing.hybrid import build, plain, scaled

from bole_runtime.integrations.transformers import MtpDrafter, MtpHead, Proposal, TreeDecoder, generate
from bole_runtime.integrations.transformers.draft import Trie
from bole_runtime.integrations.transformers.mtp_session import MtpSession

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


class Session(MtpSession):
    """Compares every proposal with one from scratch."""

    calls = 0

    def propose(self, contexts: Any, budget: int) -> list[Proposal]:
        every, drafter = super().propose(contexts, budget), self._drafter
        model, sizes = drafter.head._shared.model, (drafter.depth, drafter.width, budget)
        for made, context in zip(every, contexts, strict=True):
            if context is not None:
                want = from_scratch(drafter.head, model, list(context), *sizes)
                assert (list(made.tokens), list(made.parents)) == (list(want.tokens), list(want.parents))
                Session.calls += 1
        return every


class Checked(MtpDrafter):
    """Gives such sessions."""

    def begin(self, rows: int) -> MtpSession:
        return Session(self, rows)


@pytest.mark.parametrize(("name", "attention"), [("qwen3_5", "sdpa"), ("qwen3_5", "eager"), ("qwen3_next", "sdpa")])
def test_caches_change_nothing_and_drafts_do_not_either(name: str, attention: str) -> None:
    model = build(name, attention)
    drafter = Checked(head_of(model), depth=3, width=2)
    Session.calls = 0
    got = generate(model, PROMPTS, drafter=drafter, budget=5, max_new_tokens=12)
    for prompt, text in zip(PROMPTS, got, strict=True):
        assert list(text) == plain(model, prompt, 12)
    assert Session.calls > 10
    # A decoder is used again: nothing of the texts before is left.
    decoder = TreeDecoder(model, drafter, budget=5, max_batch=2)
    for _ in range(2):
        rounds = list(decoder.rounds(PROMPTS[:2], max_new_tokens=6))
        assert sum(len(r.tokens[0]) for r in rounds) == 6


def test_a_head_that_knows_is_followed() -> None:
    """With drafts of the model itself in the place of the head's, whole chains are accepted."""
    model = build("qwen3_5")
    text = plain(model, PROMPTS[0], 20)

    class Knows(MtpSession):
        def propose(self, contexts: Any, budget: int) -> list[Proposal]:
            super().propose(contexts, budget)
            ahead = text[len(contexts[0]) : len(contexts[0]) + 4]
            return [Proposal(ahead, list(range(-1, len(ahead) - 1)))]

    class Drafts(MtpDrafter):
        def begin(self, rows: int) -> MtpSession:
            return Knows(self, rows)

    decoder = TreeDecoder(model, Drafts(head_of(model)), budget=5)
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
    with pytest.raises(TypeError, match="nor begin"):
        TreeDecoder(model, object())  # type: ignore[arg-type]
    shared = {id(p) for p in model.parameters()}
    assert not any(id(p) in shared for p in MtpHead(model).parameters())


def test_batches_that_take_turns_do_not_meet() -> None:
    model = build("qwen3_5")
    drafter = MtpDrafter(head_of(model), depth=2)
    decoders = [TreeDecoder(model, drafter, budget=4, max_batch=2) for _ in range(2)]
    texts: list[list[int]] = [[], [], []]
    starts = [(decoders[0], PROMPTS[0]), (decoders[0], PROMPTS[1]), (decoders[1], PROMPTS[2])]
    open_ = {n: decoder.rounds(prompt, max_new_tokens=9) for n, (decoder, prompt) in enumerate(starts)}
    while open_:
        for n in list(open_):
            result = next(open_[n], None)
            if result is None:
                del open_[n]
            else:
                texts[n] += result.tokens[0]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert prompt + text == plain(model, prompt, 9)


def test_a_head_keeps_its_own_attention_and_leaves_the_model_behind() -> None:
    model = build("qwen3_5", "eager")
    head = head_of(model)
    model.set_attn_implementation("sdpa")
    hidden, tokens = torch.randn(1, 6, 32), torch.randint(0, 40, (1, 6))
    with torch.no_grad():
        before = head(hidden, tokens)[0]
        tokens[0, -1] = (tokens[0, -1] + 1) % 40
        after = head(hidden, tokens)[0]
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])
    copied = copy.deepcopy(head)
    assert copied._shared.model is model
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(head)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": 2.5}, TypeError, "max_new_tokens: expected an int"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens: expected an int"),
        ({"params": 3}, TypeError, "params: expected SamplingParams"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    decoder = TreeDecoder(build("qwen3_5"))
    with pytest.raises(error, match=message):
        decoder.rounds([1, 2], **options)
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        decoder.rounds(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(TypeError, match="budget: expected an int"):
        TreeDecoder(build("qwen3_5"), budget=2.0)  # type: ignore[arg-type]
