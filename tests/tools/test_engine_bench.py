"""The engine benchmark: aimed drafts, rows, arguments. The engine itself runs on a GPU with SGLang alone."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


def _links(parents: list[int]) -> tuple[list[int], list[int]]:
    child, sibling = [-1] * len(parents), [-1] * len(parents)
    last: dict[int, int] = {}
    for n, p in enumerate(parents[1:], 1):
        if p in last:
            sibling[last[p]] = n
        else:
            child[p] = n
        last[p] = n
    return child, sibling


@pytest.mark.interpreter
def test_one_path_gets_the_tokens_of_the_text(tools: None, tmp_path: Path) -> None:
    from engine_bench.aim import Aim
    from engine_bench.lengths import write_length

    rng = random.Random(2)
    prompts = [[rng.randrange(90) for _ in range(5)] for _ in range(3)]
    outputs = [[rng.randrange(90) for _ in range(20)] for _ in range(3)]
    path = tmp_path / "texts.json"
    path.write_text(json.dumps({"prompts": prompts, "outputs": outputs}))
    length = tmp_path / "length"
    write_length(length, 0, 0)
    aim = Aim(path, length, 90)
    aim([], SimpleNamespace())  # leaves the drafts alone
    write_length(length, 2, 5)
    lengths = set()
    for turn in range(8):
        nodes = 12
        trees = [[-1, *(rng.randrange(max(0, n - 4), n) for n in range(1, nodes))] for _ in range(4)]
        depths = []
        for tree in trees:
            depth = [0] * nodes
            for n in range(1, nodes):
                depth[n] = depth[tree[n]] + 1
            depths.append(depth)
        starts = [rng.randrange(5, 12) for _ in range(4)]
        links = [_links(t) for t in trees]
        given: Any = SimpleNamespace(
            draft_token=torch.randint(0, 90, (4 * nodes,)), draft_token_num=nodes,
            positions=torch.tensor([[s + d for d in depth] for s, depth in zip(starts, depths, strict=True)]).flatten(),
            retrieve_next_token=torch.tensor([c for c, _ in links]),
            retrieve_next_sibling=torch.tensor([s for _, s in links]),
        )  # fmt: skip
        before = given.draft_token.view(4, nodes).tolist()
        asked = [prompts[0], prompts[2], [1, 2, 3], prompts[1]]  # one that was not recorded
        requests = [SimpleNamespace(rid=f"{turn}-{n}", origin_input_ids=p) for n, p in enumerate(asked)]
        aim(requests, given)
        after = given.draft_token.view(4, nodes).tolist()
        for b, prompt in enumerate(asked):
            assert after[b][0] == before[b][0]
            if prompt not in prompts:
                assert after[b] == before[b]
                continue
            text = prompt + outputs[prompts.index(prompt)]
            # Greedy, as the target walks: the child whose token is the text's.
            node, accepted = 0, 1
            while True:
                want = text[starts[b] + depths[b][node] + 1]
                below = [n for n in range(1, nodes) if trees[b][n] == node and after[b][n] == want]
                assert len(below) <= 1, "two siblings have the right token"
                if not below:
                    break
                node, accepted = below[0], accepted + 1
            drawn = 2 + (starts[b] * 7919 + b * 104729) % 65521 % 4
            assert accepted == min(drawn, 1 + max(depths[b]))
            lengths.add(accepted)
            for n in range(1, nodes):
                on_path = after[b][n] == text[starts[b] + depths[b][n]]
                assert on_path or after[b][n] == before[b][n] or before[b][n] == text[starts[b] + depths[b][n]]
    assert lengths == {2, 3, 4, 5}


def test_rows_compare_texts_and_speeds(tools: None, tmp_path: Path) -> None:
    from engine_bench.report import Row, format_rows, save_rows

    log = tmp_path / "log"
    log.write_text(
        "Mamba Cache ... intermediate_ssm_state_cache size: 25.50GB intermediate_conv_window_cache size: 0.60GB"
    )
    want = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]]
    row = {
        "batch": 2,
        "tokens": 8,
        "seconds": 2.0,
        "prefill_seconds": 0.5,
        "rounds": 4,
        "texts": [[5, 6, 7, 8], [9, 9, 0, 9]],
    }
    times = {"forward/DECODE/2": {"ms": 3.25, "count": 9}, "forward/DECODE/1": {"ms": 1.0, "count": 9}}
    made = Row.of("tree-16", "tree", 16, row, times, want, [1, 2], log)
    assert (made.tokens_s, made.decode_tokens_s, made.accepted) == (4.0, 4.0, 2.0)
    assert (made.same, made.equal_tokens, made.tokens, made.snapshots_gb) == (1, 6, 8, 26.1)
    assert made.phases_ms == {"forward": 3.25}
    other = Row.of("bole-16", "bole", 16, {**row, "seconds": 1.0}, {}, want, [1, 2], log)
    table = format_rows([made, other])
    assert "2.00x" in table
    assert "6/8" in table
    deeper = Row.of("bole-16", "bole", 16, {**row, "seconds": 0.5, "aimed": "6"}, {}, want, [1, 2], log)
    assert "4.00x" not in format_rows([made, deeper])  # another accepted length than SGLang's tree had
    save_rows(tmp_path / "rows.json", [made], {"nodes": [16]})
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["run"] == "tree-16"


def test_processes_find_the_checkout_and_both_plug_ins(
    tools: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine_bench.runs import RUNS, environment, make_paths, node_runs

    make_paths(tmp_path)
    env = environment(RUNS["bole-fast"], tmp_path)
    assert (env["BOLE_SGLANG"], env["BOLE_SGLANG_PRECISION"]) == ("1", "fast")
    assert environment(RUNS["tree"], tmp_path)["BOLE_SGLANG"] == "0"
    assert environment(RUNS["bole-budget"], tmp_path, [8, 16])["BOLE_SGLANG_BUDGET"] == "8,16"
    assert environment(RUNS["bole-budget"], tmp_path, [32])["BOLE_SGLANG_BUDGET"] == "auto"
    monkeypatch.setenv("BOLE_SGLANG_BUDGET", "auto")
    assert "BOLE_SGLANG_BUDGET" not in environment(RUNS["bole"], tmp_path, [8, 16])
    asked = SimpleNamespace(nodes=[8, 16], steps=5)
    assert [node_runs(RUNS[r], asked) for r in ("bole", "bole-budget", "chain")] == [[8, 16], [16], [6]]
    code = (
        "from importlib.metadata import entry_points\n"
        "for e in entry_points(group='sglang.srt.plugins'): print(e.name, e.load().__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "bole bole_runtime.integrations.sglang.hooks" in done.stdout
    assert "bole-bench engine_bench.plugin" in done.stdout


def test_arguments_are_checked() -> None:
    command = [sys.executable, str(TOOLS / "bench_sglang.py"), "--model", "x"]
    done = subprocess.run([*command, "--runs", "ar,vllm"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "vllm is not one of ar, tree, bole" in done.stderr
    assert subprocess.run([*command, "--accepted", "8-2"], capture_output=True).returncode == 2
    assert subprocess.run([*command, "--accepted", "0-2"], capture_output=True).returncode == 2
    assert subprocess.run([*command, "--steps", "0"], capture_output=True).returncode == 2


def test_texts_of_another_run_are_refused(tools: None, tmp_path: Path) -> None:
    from bench_sglang import build_parser, settings_of

    texts = tmp_path / "texts.json"
    command = [sys.executable, str(TOOLS / "bench_sglang.py"), "--model", "x", "--runs", "tree", "--texts", str(texts)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is none; add ar to --runs" in done.stderr
    args = build_parser().parse_args(["--model", "x", "--new", "64", "--accepted", "2,4-6,8"])
    assert args.accepted == [(2, 2), (4, 6), (8, 8)]
    texts.write_text(json.dumps({"prompts": [], "outputs": [], "settings": settings_of(args)}))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "'new': 64" in done.stderr
