"""Decoding of transformers models on a GPU, launch by launch and from CUDA graphs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from bole_testing.hybrid import build, scaled

from bole_runtime import SamplingParams
from bole_runtime.integrations.transformers import MtpDrafter, MtpHead, PromptLookup, TreeDecoder

pytest.importorskip("transformers", reason="needs transformers: pip install '.[models]'")
pytestmark = pytest.mark.gpu

PROMPTS = [[3, 17, 5, 9, 9, 30, 3, 17, 5], [7, 1, 2]]


def plainly(model: Any, new: int) -> list[list[int]]:
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device="cuda")
        options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
        texts.append(model.generate(ids, max_new_tokens=new, **options)[0].tolist())
    return texts


def texts_of(decoder: TreeDecoder, **options: Any) -> list[list[int]]:
    rows = [list(prompt) for prompt in PROMPTS]
    for result in decoder.rounds(PROMPTS, **options):
        for row, tokens in zip(rows, result.tokens, strict=True):
            row.extend(tokens)
    return rows


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "kimi_linear", "nemotron_h"])
def test_greedy_is_generate(name: str, cuda_graphs: bool) -> None:
    model = build(name).cuda()
    want = plainly(model, 130)
    decoder = TreeDecoder(model, PromptLookup(), budget=7, max_batch=2, cuda_graphs=cuda_graphs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(2):
            assert texts_of(decoder, max_new_tokens=130) == want
    if name == "qwen3_5":
        assert decoder.recorder.enabled == cuda_graphs


@pytest.mark.parametrize("policy", ["fused", "deferred"])
def test_policies_from_graphs(policy: str) -> None:
    model = build("qwen3_5").cuda()
    decoder = TreeDecoder(model, PromptLookup(), budget=7, max_batch=2, policy=policy, cuda_graphs=True)
    for _ in range(2):
        assert texts_of(decoder, max_new_tokens=60) == plainly(model, 60)
    assert decoder.recorder.enabled


def test_sampling_from_graphs() -> None:
    model = build("qwen3_5").cuda()
    decoders = [
        TreeDecoder(model, drafter, budget=5, max_batch=2, cuda_graphs=graphs)
        for drafter, graphs in ((None, False), (PromptLookup(), True))
    ]
    for temperature in (0.7, 1.3):
        params = SamplingParams(2, temperature=temperature, top_p=0.9, device="cuda")
        chain, tree = (texts_of(d, max_new_tokens=40, params=params, seeds=[3, 4]) for d in decoders)
        assert chain == tree


def test_drafts_of_a_head_from_graphs() -> None:
    model = build("qwen3_5").cuda()
    torch.manual_seed(5)
    head = scaled(MtpHead(model)).cuda()
    rounds = []
    for graphs in (False, True):
        drafter = MtpDrafter(head, depth=3, cuda_graphs=graphs)
        decoder = TreeDecoder(model, drafter, budget=5, max_batch=2, cuda_graphs=graphs)
        for _ in range(2):
            assert texts_of(decoder, max_new_tokens=60) == plainly(model, 60)
        rounds.append([r.nodes for r in decoder.rounds(PROMPTS, max_new_tokens=60)])
        assert drafter.recorder.enabled == graphs
    assert rounds[0] == rounds[1]
