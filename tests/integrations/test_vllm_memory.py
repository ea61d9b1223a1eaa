"""Pages and bytes saved: counted by hand, and what docs/engines.md says of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from bole_codegen.presets import get_preset
from bole_runtime import LayerGeometry, plan_memory
from bole_runtime.integrations.vllm import PageLayout, SavedMemory, saved_memory

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "engines.md"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def of_model(name: str, state: str, batch: int, drafts: int, mode: str = "none") -> SavedMemory:
    preset = get_preset(name)
    assert None not in (preset.hk, preset.hv, preset.dk, preset.dv, preset.conv_width)
    (channels,) = preset.conv_channels
    layer = LayerGeometry(
        preset.hk, preset.hv, preset.dk, preset.dv, preset.family, "raw",  # type: ignore[arg-type]
        conv_width=preset.conv_width, conv_channels=channels,  # type: ignore[arg-type]
    )  # fmt: skip
    attention = preset.raw["attn"]
    token = 2 * attention["kv"] * attention["d"] * 2  # keys and values in bf16
    layout = PageLayout(layer, drafts, DTYPES[state])
    return saved_memory(layout, layers=preset.recurrent_layers, batch=batch, mode=mode, token_bytes=token)


def test_pages_by_hand() -> None:
    got = of_model("Qwen3.5-9B", "fp32", 64, 3)
    # 24 layers, 32 x 128 x 128 fp32 and 6 columns of 8192 bf16; a token of attention takes 2 x 4 x 256 x 2 bytes.
    assert 32 * 128 * 128 * 4 + 6 * 8192 * 2 == 2195456
    assert got.page_bytes == 34 * 16 * 4096  # 33.5 blocks of 16 tokens
    assert got.bole_page_bytes == 33 * 16 * 4096  # 32.75 of them
    assert (got.pages, got.bole_pages, got.pages_saved) == (24 * 64 * 4, 24 * 64, 24 * 64 * 3)
    # k, v and two fp32 gates of 4 nodes, and their 8192 inputs of the convolution.
    assert got.factors == 24 * 64 * 4 * ((2048 + 4096) * 2 + 2 * 32 * 4 + 8192 * 2)
    assert got.before == got.pages * got.page_bytes
    assert got.saved == got.before - got.bole_pages * got.bole_page_bytes - got.factors
    aligned = of_model("Qwen3.5-9B", "fp32", 64, 3, "align")
    assert (aligned.pages, aligned.bole_pages) == (24 * 64 * 5, 24 * 64 * 2)


def test_factors_are_those_of_a_manager() -> None:
    layer = LayerGeometry(16, 32, 128, 128, conv_width=4)
    plan = plan_memory([layer] * 2, slots=4, max_batch=4, max_nodes=16)
    assert saved_memory(PageLayout(layer, 3), layers=2, batch=4, nodes=16).factors == plan.factors + plan.conv_inputs


def test_a_large_tree_can_cost_more_than_few_states() -> None:
    layer = LayerGeometry(16, 32, 128, 128, conv_width=4)
    assert saved_memory(PageLayout(layer, 1), layers=1, batch=1, nodes=512).saved < 0


def test_errors() -> None:
    layout = PageLayout(LayerGeometry(1, 1, 16, 16))
    with pytest.raises(ValueError, match="mode: 'all' is not allowed; allowed: none, align"):
        saved_memory(layout, layers=1, batch=1, mode="all")
    for name in ("layers", "batch", "token_bytes", "multiple"):
        with pytest.raises(ValueError, match=name):
            saved_memory(layout, **({"layers": 1, "batch": 1} | {name: -1}))  # type: ignore[arg-type]


def test_the_documents_numbers() -> None:
    text = DOCUMENT.read_text().split("## vLLM", 1)[1]
    rows = re.findall(
        r"^\| ([\w.-]+) \| (fp32|bf16) \| (\d+) \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M
    )
    assert len(rows) == 12  # none that the pattern misses
    for name, state, drafts, pages, before, after, factors in rows:
        got = of_model(name, state, 64, int(drafts))
        shown = f"{got.pages_saved:,}", *(f"{n / 2**30:.2f}" for n in (got.before, got.after, got.factors))
        assert shown == (pages, before, after, factors), name
