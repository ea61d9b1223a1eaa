"""The serving loop of docs/runtime.md: short, and equal to plain decoding under every policy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bole_runtime import StateManager, TreeBatch

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "runtime.md"


def block() -> str:
    (found,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S)
    return found


def plain(names: dict[str, Any], prompt: list[int], length: int) -> list[int]:
    """Decode token by token with the model of the document."""
    manager = StateManager([names["layer"]] * names["LAYERS"], slots=1, max_batch=1, max_nodes=1, dtype=torch.float32)
    rnd = manager.round(TreeBatch.chain(1, 1), torch.tensor([manager.allocate()]))
    text = list(prompt)
    for n in range(length - 1):
        logits = names["forward"](rnd, torch.tensor([text[n : n + 1]]))
        rnd.commit(torch.tensor([0]))
        if n + 1 == len(text):
            text.append(int(logits[0, 0].argmax()))
    return text


@pytest.mark.parametrize("policy", ["eager", "fused", "deferred"])
def test_the_loop_is_plain_decoding(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = block()
    assert len(code.splitlines()) < 60
    assert code.count('policy="deferred"') == 1
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code.replace('policy="deferred"', f"policy={policy!r}"), "runtime.md", "exec"), names)
    assert "snapshots of" in capsys.readouterr().out
    assert len(names["finished"]) == 5
    for i in range(5):
        assert names["finished"][f"request {i}"] == plain(names, [3 * i + 1, 7, i], 16)
    assert names["manager"].used_slots == frozenset()


def test_the_numbers_of_the_document() -> None:
    from bole_runtime import LayerGeometry, plan_memory

    layer = LayerGeometry(16, 32, 128, 128, conv_width=4)
    plan = plan_memory([layer] * 24, slots=64, max_batch=64, max_nodes=64, max_total=1024)
    text = " ".join(DOCUMENT.read_text().split())
    said = (
        f"1024 nodes are {plan.factors / 2**30:.2f} GiB of factors against {plan.snapshots / 2**30:.0f} GiB of "
        f"snapshots, {plan.ratio:.0f} times less"
    )
    assert said in text
    state, token = 2 * 2**20, plan.factors / 24 / 1024
    best = (2 * 4 * state / token) ** 0.5
    assert f"{best:.0f} with 4 accepted a round, 2 MiB and {token / 1024:.2f} KiB" in text
    assert f"Convolution inputs ({plan.conv_inputs / 2**30:.2f} GiB there)" in text
