"""bench_conv: bytes, SGLang's form of a tree, and a run that only checks."""

from __future__ import annotations

import json
from pathlib import Path

import bench_conv
import pytest
import torch
from peers.base import PeerUnavailable
from peers.sglang_conv import links, load_conv


def test_bytes() -> None:
    # 64 requests of 16 nodes, 8192 channels, bf16: x and out 16.8 MB each, state 3.1 MB, weight 65.5 KB.
    assert bench_conv.conv_bytes(64, 16, 8192, 4, 2, 2) == 2 * 16777216 + 3145728 + 65536


def test_links() -> None:
    child, sibling = links(torch.tensor([[-1, 0, 0, 1, 2, 2], [-1, 0, 1, 2, 3, 4]]))
    assert child.tolist() == [[1, 3, 4, -1, -1, -1], [1, 2, 3, 4, 5, -1]]
    assert sibling.tolist() == [[-1, 2, -1, -1, 5, -1], [-1] * 6]


def test_check_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    assert bench_conv.main(["--check-only", "--channels", "40", "--points", "2x9,1x33", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["batch"], r["nodes"]) for r in rows] == [(2, 9), (1, 33)]
    assert all(0 < r["errors"]["bole"] < 4e-3 and not r["wrong"] and not r["us"] for r in rows)
    assert "C40 B2 N9 ragged" in capsys.readouterr().out


def test_a_wrong_output_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run = bench_conv._run_conv

    def wrong(layer, *rest):
        factors = run(layer, *rest)
        layer.out[0, 0, 0] += 9
        return factors

    monkeypatch.setattr(bench_conv, "_run_conv", wrong)
    assert bench_conv.main(["--check-only", "--channels", "8", "--points", "1x4"]) == 1


def test_no_gpu_and_no_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_conv.main([]) == 2
    with pytest.raises(PeerUnavailable, match="no --sglang PATH"):
        load_conv(None, tmp_path)
    with pytest.raises(PeerUnavailable, match="holds no sglang/kernels"):
        load_conv(str(tmp_path), tmp_path)
