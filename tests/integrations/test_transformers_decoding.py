"""Tree decoding with transformers models against their own decoding, token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from bole_testing.hybrid import SIZES, VOCABULARY, build, plain, scaled

from bole_runtime import SamplingParams
from bole_runtime.integrations.transformers import (
    ModelDrafter,
    PromptLookup,
    Proposal,
    TreeDecoder,
    generate,
    stream,
)

pytest.importorskip("transformers", reason="needs transformers: pip install '.[models]'")

PROMPT = [3, 17, 5, 9, 9, 30, 3, 17, 5]


class Oracle:
    """Knows the texts. Hides the next few tokens of one in a random tree, up to a random depth."""

    def __init__(self, texts: Sequence[Sequence[int]], seed: int = 0) -> None:
        self.texts, self.rng = [list(text) for text in texts], random.Random(seed)

    def propose(self, context: Sequence[int], budget: int) -> Proposal:
        known = next((t for t in self.texts if t[: len(context)] == list(context)), None)
        assert known is not None, "decoding has left the text"
        rng, truth = self.rng, known[len(context) :]
        tokens: list[int] = []
        parents: list[int] = []
        end, reached = -1, 0
        for n in range(rng.randint(0, budget)):
            if reached < len(truth) and rng.random() < 0.4:
                tokens.append(truth[reached])
                parents.append(end)
                end, reached = n, reached + 1
            else:
                tokens.append(rng.randrange(VOCABULARY))
                parents.append(rng.randint(-1, n - 1))
        return Proposal(tokens, parents)


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("qwen3_next", "eager"),
        ("qwen3_next", "sdpa"),
        ("qwen3_5", "eager"),
        ("qwen3_5", "sdpa"),
        ("qwen3_5_moe", "sdpa"),
        ("kimi_linear", "sdpa"),
        ("nemotron_h", "eager"),
    ],
)
def test_greedy_is_generate(name: str, attention: str) -> None:
    model = build(name, attention)
    want = plain(model, PROMPT, 40)
    assert len(set(want)) > 15
    decoder = TreeDecoder(model, Oracle([want]), budget=12)
    rounds = list(decoder.rounds(PROMPT, max_new_tokens=40))
    assert PROMPT + [t for r in rounds for t in r.tokens[0]] == want
    paths = [r.accepted[0] for r in rounds]
    assert max(paths) >= 5
    assert 1 in paths
    assert len(rounds) < 30
    assert decoder.manager.free_slots == 1


@pytest.mark.parametrize("policy", ["fused", "deferred"])
def test_policies(qwen: Any, policy: str) -> None:
    want = plain(qwen, PROMPT, 50)
    decoder = TreeDecoder(qwen, Oracle([want], 4), budget=9, policy=policy)
    assert PROMPT + [t for r in decoder.rounds(PROMPT, max_new_tokens=50) for t in r.tokens[0]] == want


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "kimi_linear", "nemotron_h"])
def test_unequal_prompts(name: str) -> None:
    model = build(name)
    prompts = [[7], PROMPT, [1, 2], list(range(20))]
    wants = [plain(model, prompt, 10) for prompt in prompts]
    assert generate(model, prompts, drafter=Oracle(wants), budget=8, max_new_tokens=10) == wants
    assert generate(model, prompts, max_new_tokens=10) == wants


def test_a_batch_that_is_padded_on_the_left(qwen: Any) -> None:
    prompts = [PROMPT, [7, 1, 2]]
    wants = [plain(qwen, prompt, 12) for prompt in prompts]
    ids = torch.tensor([PROMPT, [0] * 6 + [7, 1, 2]])
    mask = torch.tensor([[1] * 9, [0] * 6 + [1] * 3])
    got = generate(qwen, ids, attention_mask=mask, max_new_tokens=12)
    assert isinstance(got, torch.Tensor)
    assert got.tolist() == [wants[0], [0] * 6 + wants[1]]


def test_rows_that_end_early(qwen: Any) -> None:
    prompts = [PROMPT, [7, 1, 2]]
    free = [plain(qwen, prompt, 20) for prompt in prompts]
    stop = free[1][3 + 5]
    wants = [plain(qwen, prompt, 20, eos_token_id=stop) for prompt in prompts]
    assert len(wants[1]) <= 3 + 6
    got = generate(qwen, prompts, drafter=Oracle(free), max_new_tokens=20, eos_token_id=stop)
    assert got == wants
    ids = torch.tensor([[7, 1, 2]])
    padded = generate(qwen, ids, max_new_tokens=20, eos_token_id=[stop])
    assert isinstance(padded, torch.Tensor)
    assert padded[0].tolist() == wants[1]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 8, "min_p": 0.02}])
def test_sampling_is_the_chain(qwen: Any, options: dict[str, Any]) -> None:
    prompts, seeds = [PROMPT, [7, 1]], [11, 12]

    def run(drafter: Any, seeds: Sequence[int]) -> Any:
        decoder = TreeDecoder(qwen, drafter, budget=8, max_batch=2)
        rows = [list(prompt) for prompt in prompts]
        rounds = decoder.rounds(prompts, max_new_tokens=16, params=SamplingParams(2, **options), seeds=seeds)
        for result in rounds:
            for row, tokens in zip(rows, result.tokens, strict=True):
                row.extend(tokens)
        return rows

    chain = run(None, seeds)
    assert run(Oracle(chain), seeds) == chain
    assert run(PromptLookup(), seeds) == chain
    other = run(None, [13, 12])
    assert other[0] != chain[0]
    assert other[1] == chain[1]


def test_a_draft_model(qwen: Any) -> None:
    want = plain(qwen, PROMPT, 20)
    same = list(TreeDecoder(qwen, ModelDrafter(qwen, depth=3)).rounds(PROMPT, max_new_tokens=20))
    assert [t for r in same for t in r.tokens[0]] == want[9:]
    # A draft equal to the target is accepted whole: prefill, then four tokens a round.
    assert [r.accepted[0] for r in same[1:-1]] == [4] * 4
    assert {r.nodes[0] for r in same[1:-1]} == {7}
    other = ModelDrafter(build("qwen3_5", seed=1), depth=2)
    assert generate(qwen, [PROMPT], drafter=other, max_new_tokens=20) == [want]


def test_streaming_stops_whenever_one_likes(qwen: Any) -> None:
    want = plain(qwen, PROMPT, 20)
    assert PROMPT + list(stream(qwen, torch.tensor(PROMPT), max_new_tokens=20)) == want
    decoder = TreeDecoder(qwen, PromptLookup())
    first = decoder.rounds(PROMPT, max_new_tokens=20)
    next(first)
    with pytest.raises(RuntimeError, match="slot"):
        next(decoder.rounds(PROMPT))
    first.close()  # type: ignore[attr-defined]
    assert PROMPT + [t for r in decoder.rounds(PROMPT, max_new_tokens=20) for t in r.tokens[0]] == want
    assert plain(qwen, PROMPT, 20) == want
    assert not any("forward" in m.__dict__ for m in qwen.modules())


def test_low_precision_runs() -> None:
    model = build("qwen3_5").bfloat16()
    got = generate(model, [PROMPT], max_new_tokens=12)
    assert len(got[0]) == 21


def test_a_model_with_images(qwen: Any) -> None:
    module = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    from transformers import Qwen3_5Config

    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    torch.manual_seed(3)
    model = scaled(module.Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=SIZES, vision_config=vision)))
    want = plain(model, PROMPT, 16)
    assert generate(model, [PROMPT], drafter=Oracle([want]), max_new_tokens=16) == [want]
