"""The training script, tiny and for seconds: what it writes is what decoding token by token writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.mark.slow
def test_a_tiny_model_is_trained_and_measured(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[models]'")
    out = tmp_path / "out.json"
    command = [
        sys.executable, str(TOOLS / "train_hybrid.py"), "--tiny", "--minutes", "0.1", "--device", "cpu", "--rows", "2",
        "--length", "48", "--prompts", "3", "--prompt", "16", "--new", "10", "--batch", "2", "--json", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(out.read_text())["results"]
    plain = results["token by token"]
    assert plain["tokens_a_round"] == 1.0
    assert [len(t) for t in plain["texts"]] == [10, 10, 10]
    for got in results.values():
        assert got["texts"] == plain["texts"]
        assert got["tokens_a_round"] >= 1.0
    assert "same text" in done.stdout


def test_losses_are_those_of_the_tokens_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install '.[models]'")
    monkeypatch.syspath_prepend(str(TOOLS))
    from hybrid.train import build, losses

    torch.manual_seed(0)
    model, head = build(True, torch.device("cpu"))
    ids = torch.randint(0, 256, (2, 12))
    with torch.no_grad():
        got = losses(model.eval(), head.eval(), ids, 2)
        hidden = model.get_decoder()(input_ids=ids).last_hidden_state
        # One position at a time: after token i, the head reads token i + 1 and says what token i + 2 is, then i + 3.
        wanted: list[list[torch.Tensor]] = [[], [], []]
        for b in range(2):
            for i in range(11):
                wanted[0].append(-model.lm_head(hidden[b, i]).log_softmax(-1)[ids[b, i + 1]])
            once, logits = head(hidden[b : b + 1, :-1], ids[b : b + 1, 1:])
            for i in range(10):
                wanted[1].append(-logits[0, i].log_softmax(-1)[ids[b, i + 2]])
            _, logits = head(once[:, :-1], ids[b : b + 1, 2:])
            for i in range(9):
                wanted[2].append(-logits[0, i].log_softmax(-1)[ids[b, i + 3]])
    for x, y in zip(got, wanted, strict=True):
        assert float(x) == pytest.approx(float(torch.stack(y).mean()), rel=1e-5)


def test_arguments() -> None:
    if torch.cuda.is_available():
        pytest.skip("a machine without a GPU is told so")
    done = subprocess.run([sys.executable, str(TOOLS / "train_hybrid.py")], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--device cpu --tiny" in done.stderr


def test_an_exported_model_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install '.[models]'")
    monkeypatch.syspath_prepend(str(TOOLS))
    from hybrid.export import export
    from hybrid.train import build
    from safetensors.torch import load_file

    torch.manual_seed(1)
    model, head = build(True, torch.device("cpu"))
    with torch.no_grad():
        for part in (model, head):
            for parameter in part.parameters():
                parameter.copy_(parameter.bfloat16())
    export(model.eval(), head.eval(), [[1, 2, 3]], tmp_path)
    loaded = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(0, 250, (1, 9))
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    saved = load_file(str(tmp_path / "model.safetensors"))
    assert torch.equal(saved["mtp.fc.weight"].float(), head.project.weight)
    assert torch.equal(saved["mtp.layers.0.self_attn.q_proj.weight"].float(), head.block.self_attn.q_proj.weight)
    assert {"mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.pre_fc_norm_embedding.weight"} <= saved.keys()
    assert json.loads((tmp_path / "prompts.json").read_text()) == [[1, 2, 3]]
