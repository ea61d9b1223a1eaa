"""The calibration of a complete forward: its model, its table, and that the simulator takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import calibrate_forward
import pytest
import simulate_budget
import torch
from forward_bench.attention import METHODS
from forward_bench.capture import Ahead, Forwards
from forward_bench.model import Model, Step, Weights, qwen, tiny, topology

from bole_codegen.measure import CaptureError
from bole_runtime import TreeBatch
from bole_runtime.budget import Point, load_calibration

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--tiny", "--repeats", "3", "--warmup", "0"]


def model(max_nodes: int = 6) -> Model:
    made = Model(tiny(), max_batch=2, max_nodes=max_nodes, dtype=torch.float32, device=CPU, seed=5)
    made.cache(2, 11)
    return made


def test_the_sizes_are_those_of_the_model() -> None:
    shape = qwen()
    made = Weights(shape, torch.bfloat16, torch.device("meta"))
    count = made.embedding.numel() + made.head.numel() + sum(t.numel() for w in made.layers for t in w.values())
    assert [n for n in range(32) if shape.attends(n)] == list(range(3, 32, 4))
    assert sum(core is not None for core in made.cores) == 24
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        theirs = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig())
    # But for convolutions, gate parameters and norms.
    assert count == pytest.approx(sum(p.numel() for p in theirs.parameters()), rel=2e-4)


@pytest.mark.parametrize(("nodes", "depth"), [(1, 0), (2, 1), (9, 8), (16, 8), (64, 8), (64, 1)])
def test_trees_are_as_deep_as_asked(nodes: int, depth: int) -> None:
    tree = TreeBatch.from_parents(torch.tensor([topology(nodes, depth)]), max_depth=depth)
    assert int(tree.depths.amax()) == depth
    assert int(tree.depths.amin()) == 0
    assert int((tree.depths == 0).sum()) == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_node_of_a_tree_is_the_end_of_its_chain(method: str) -> None:
    made = model()
    tree = Step(made, 2, 6, 11, 3, method=method, whole=False)
    logits = tree().clone()
    assert torch.equal(tree(), logits)  # nothing was committed
    assert logits.shape == (2, 6, 61)
    for node in range(6):
        path = tree.tree.path(0, node)
        chain = Step(made, 2, len(path), 11, len(path) - 1, method=method, whole=False)
        chain.tokens.copy_(tree.tokens[:, path])
        torch.testing.assert_close(chain()[:, -1], logits[:, node], rtol=2e-4, atol=2e-5)


def test_both_ways_of_attention_agree_and_the_context_counts() -> None:
    made = model()
    steps = [Step(made, 2, 6, 11, 3, method=m, whole=False) for m in METHODS]
    steps[1].tokens.copy_(steps[0].tokens)
    first, second = (step() for step in steps)
    torch.testing.assert_close(first, second, rtol=2e-4, atol=2e-5)
    made.caches[:, 0, 0, 3] += 1
    changed = steps[0]()
    assert not torch.allclose(changed[0], first[0], atol=1e-3)
    assert torch.equal(changed[1], first[1])


def test_a_whole_step_commits() -> None:
    made = model()
    step = Step(made, 2, 6, 11, 3, method="parts", whole=True)
    before = [pool.clone() for pool in (*made.manager.request.pools, *made.manager.request.conv_pools)]
    step()
    after = [*made.manager.request.pools, *made.manager.request.conv_pools]
    assert len(after) == 6
    assert not any(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_the_table_is_written_resumed_and_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "table.json"
    sizes = ["--batch", "1,2", "--nodes", "4,8", "--depth", "5", "--out", str(out)]
    assert calibrate_forward.main([*TINY, *sizes, "--kv", "9"]) == 0
    assert calibrate_forward.main([*TINY, *sizes, "--kv", "9,20", "--resume"]) == 0
    table = load_calibration(out)
    assert [(e.batch, e.kv, e.depth, e.nodes) for e in table.entries] == [
        (b, kv, d, n) for b in (1, 2) for kv in (9, 20) for d, n in ((0, 1), (3, 4), (5, 8))
    ]
    assert (table.label, table.device) == ("measured", "cpu")
    assert all(e.median_us > 0 and e.repeats == 3 for e in table.entries)
    for said in ("tiny test model's sizes, 4 layers, random weights", "forward only", "fp32 on a CPU"):
        assert said in table.name
    printed = capsys.readouterr().out
    assert "batch 2, kv 20: 3 points" in printed
    assert "published, eps 0.1" in printed
    simulated = ["--costs", str(out), "--kv", "12", "--rounds", "2", "--out", str(tmp_path / "sim")]
    assert simulate_budget.main(simulated) == 0  # the batches are the table's
    printed = capsys.readouterr().out
    assert "measured: tiny test model" in printed
    assert "published (eps 0.1)" in printed
    assert simulate_budget.main([*simulated, "--batches", "4"]) == 2
    assert "batch: 4 is above the largest calibrated one, 2" in capsys.readouterr().err


def test_a_table_of_fewer_layers_says_so(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    sizes = ["--batch", "1", "--nodes", "2", "--kv", "8", "--layers", "2", "--whole", "--attention", "masked"]
    assert calibrate_forward.main([*TINY, *sizes, "--out", str(out)]) == 0
    name = load_calibration(out).name
    assert "2 layers of 4" in name
    assert "greedy acceptance, commit" in name
    assert calibrate_forward.main([*TINY, *sizes[:-2], "--out", str(out), "--resume"]) == 2  # another table


def test_what_fails_is_named_and_what_is_finished_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = Forwards.__call__

    def narrow(self: Forwards, point: Point) -> Any:
        return None if point.kv > 9 else call(self, point)

    monkeypatch.setattr(Forwards, "__call__", narrow)
    out = tmp_path / "table.json"
    assert calibrate_forward.main([*TINY, "--batch", "1", "--nodes", "2", "--kv", "9,20", "--out", str(out)]) == 1
    assert "decoding cannot run at batch 1, kv 20" in capsys.readouterr().err
    assert {e.kv for e in load_calibration(out).entries} == {9}


def test_memory_that_does_not_suffice_leaves_a_point_out(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = Forwards(model(), method="parts", whole=False)
    assert forwards(Point(2, 3, 11, 2)) is not None

    def fail(error: Exception) -> None:
        def step(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr("forward_bench.capture.Step", step)

    full = torch.cuda.OutOfMemoryError("no memory")
    fail(full)
    assert forwards(Point(2, 4, 11, 2)) is None
    wrapped = CaptureError("warm-up failed")
    wrapped.__cause__ = full
    fail(wrapped)
    assert forwards(Point(2, 4, 11, 2)) is None
    fail(CaptureError("capture failed"))
    with pytest.raises(CaptureError):
        forwards(Point(2, 4, 11, 2))


@pytest.mark.slow
def test_sizes_are_run_ahead_by_other_processes() -> None:
    options = {"method": "parts", "whole": True}
    points = [Point(1, 1, 0, 0), Point(2, 4, 0, 3)]
    assert Ahead(tiny(), points, "lossless", options, 1, "cpu").wait() == "kernels of 2 sizes compiled ahead"
    assert Ahead(tiny(), points, "lossless", options, 0, "cpu").wait() == "kernels of 0 sizes compiled ahead"
    failed = Ahead(tiny(), points, "exact", options, 1, "cpu").wait()
    assert failed.startswith("kernels of 0 sizes compiled ahead; failed: ValueError: precision: 'exact'")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu"], "--device cpu: only with --tiny"),
        (["--nodes", "0"], "--nodes"),
        ([*TINY, "--nodes", "600"], "600 nodes are not allowed"),
        ([*TINY, "--repeats", "2"], "whole numbers, 3 or more"),
    ],
)
def test_arguments_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        calibrate_forward.main(arguments)
    assert message in capsys.readouterr().err


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert calibrate_forward.main([]) == 2
    assert "--device cpu --tiny" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_captured_step_gives_the_logits_of_a_cpu(method: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    made = Model(tiny(), max_batch=2, max_nodes=6, dtype=torch.bfloat16, device=device, seed=5)
    forwards = Forwards(made, method=method, whole=False)
    try:
        assert forwards(Point(2, 6, 16, 3)) is not None
        step = Step(made, 2, 6, 16, 3, method=method, whole=False)
        logits = step().float()
        assert bool(logits.isfinite().all())
        other = Step(made, 2, 6, 16, 3, method=METHODS[method == METHODS[0]], whole=False)
        other.tokens.copy_(step.tokens)
        error = float((other().float() - logits).norm() / logits.norm())
        assert error < 0.05  # False for NaN, too
    finally:
        forwards.close()
