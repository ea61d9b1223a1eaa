"""The budget's controller in a stand-in for SGLang's EAGLE worker; the next round starts before the last is read."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bole_runtime.budget.table import CalibrationTable, Timing, save_calibration
from bole_runtime.integrations.sglang import budget, drafted, served
from bole_runtime.integrations.sglang.budget import BudgetController, forward_batch, make_controller, worker_init
from bole_runtime.integrations.sglang.budget_checks import check_algorithm, check_worker, node_candidates
from bole_runtime.integrations.sglang.budget_costs import FileCosts
from bole_runtime.integrations.sglang.budget_seams import BUDGET_CHANGED
from bole_runtime.integrations.sglang.drafted import DraftedSums, organize
from bole_runtime.integrations.sglang.hooks import budget_hooks
from bole_runtime.integrations.sglang.options import Options
from bole_runtime.integrations.sglang.served import NotServed

STEPS, TOPK, MOST = 5, 4, 32


class Worker:
    """What the budget needs of an ``EAGLEWorkerV2``: drafts accept one token less than the log of their number."""

    def __init__(self, **arguments: Any) -> None:
        self.server_args = SimpleNamespace(max_speculative_num_draft_tokens=MOST, _runtime_mutations=[], **arguments)
        self.topk, self.speculative_num_steps, self.speculative_num_draft_tokens = TOPK, STEPS, MOST
        self.page_size, self.device = 1, "cpu"
        self.speculative_algorithm = SimpleNamespace(name="EAGLE")
        self.adaptive_controller: Any = None
        self._target_worker = SimpleNamespace(model_runner=SimpleNamespace(model_config=None))
        self.built: list[tuple[int, int]] = []
        self.applied: list[int] = []
        self.ran: list[tuple[int, int]] = []

    def build_adaptive_runtime_state(
        self, speculative_num_steps: int, speculative_num_draft_tokens: int, cuda_graph_bs: Any = None
    ) -> Any:
        assert cuda_graph_bs is None
        self.built.append((speculative_num_steps, speculative_num_draft_tokens))
        return SimpleNamespace(
            speculative_num_steps=speculative_num_steps, speculative_num_draft_tokens=speculative_num_draft_tokens
        )

    def apply_runtime_state(self, state: Any) -> None:
        if self.speculative_num_steps == state.speculative_num_steps:
            return  # SGLang's own test, which trees of one depth would not pass
        self.speculative_num_steps = state.speculative_num_steps
        self.speculative_num_draft_tokens = state.speculative_num_draft_tokens
        self.applied.append(state.speculative_num_draft_tokens)
        self.server_args._runtime_mutations.append(("adaptive_spec.restore", {}))

    def init_cuda_graphs(self, batches: list[int] | None) -> None:
        self.adaptive_controller.register(
            SimpleNamespace(
                speculative_num_steps=STEPS, speculative_num_draft_tokens=MOST,
                target_graph_runner=batches and SimpleNamespace(capture_bs=batches),
            )
        )  # fmt: skip
        self.adaptive_controller.init_states(cuda_graph_bs=None)

    def forward_batch_generation(self, batch: Any) -> int:
        """Draft and verify a batch; returns the drafts accepted of each request."""
        if batch.forward_mode.is_extend():
            return 0
        rows = batch.seq_lens.shape[0]
        self.adaptive_controller.activate_step_by_batch(rows)
        nodes = self.speculative_num_draft_tokens
        self.ran.append((rows, nodes))
        scores = [torch.full((rows, TOPK, TOPK), 0.1) for _ in range(STEPS - 1)]
        if self.speculative_num_steps == 0:
            return 0  # SGLang verifies the last token alone
        organize(lambda *a: None, [torch.full((rows, 1, TOPK), 0.25), *scores], [], [], nodes)
        return min(nodes.bit_length() - 2, self.speculative_num_steps)

    def on_verify_complete_cpu(self, accepted: list[int], batch_size: int) -> None:
        self.adaptive_controller.on_verify_complete(accepted, batch_size=batch_size)


def batch_of(rows: int, prompt: bool = False) -> Any:
    requests = [SimpleNamespace(origin_input_ids=[0] * 60, output_ids=[0] * 40) for _ in range(rows)]
    mode = SimpleNamespace(is_extend=lambda: prompt)
    return SimpleNamespace(forward_mode=mode, is_extend_in_batch=False, seq_lens=torch.ones(rows), reqs=requests)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    drafted.install(None)
    logging.getLogger(__name__).removeFilter(budget._quiet)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(budget.time, "perf_counter", lambda: made.now)
    return made


def start(given: tuple[int, ...] | str = (8, 16), costs: str = "", batches: tuple[int, ...] = (1, 8, 32)) -> Worker:
    worker = Worker()
    worker.adaptive_controller = make_controller(worker, Options(True, "lossless", given, costs))
    worker.init_cuda_graphs(list(batches))
    return worker


def serve(worker: Worker, clock: Any, rows: int, rounds: int, us: dict[int, float]) -> list[int]:
    """Run rounds with overlap: each is read after the next was started. Returns the nodes of each."""
    first, waiting = len(worker.ran), None
    for _ in range(rounds):
        accepted = forward_batch(lambda w, b: w.forward_batch_generation(b), worker, batch_of(rows))
        if waiting is not None:
            worker.on_verify_complete_cpu([waiting] * rows, rows)
        waiting = accepted
        clock.now += us[worker.ran[-1][1]] / 1e6
    worker.on_verify_complete_cpu([waiting or 0] * rows, rows)
    return [nodes for _, nodes in worker.ran[first:]]


def test_hooks_cover_the_seams() -> None:
    assert tuple(budget_hooks()) == BUDGET_CHANGED


def test_states_are_made_once_and_the_largest_is_the_engine_s() -> None:
    worker = start((8, 16))
    assert worker.built == [(5, 16), (5, 8)]
    assert worker.applied == []
    assert worker.speculative_num_draft_tokens == MOST
    assert start("auto").built == [(5, 16), (5, 8)]
    assert start((4,)).built == [(3, 4)]  # three drafts are no deeper than three steps


def test_the_number_follows_the_times_of_each_batch(clock: Any) -> None:
    worker = start()
    cheap = {8: 5000.0, 16: 5100.0, 32: 5200.0}
    steep = {8: 6000.0, 16: 12000.0, 32: 24000.0}
    assert set(serve(worker, clock, 1, 200, cheap)[100:]) == {32}
    assert set(serve(worker, clock, 30, 200, steep)[100:]) == {8}  # in the graph of 32
    again = serve(worker, clock, 1, 20, cheap)
    assert set(again) == {32}  # both are known by now
    assert set(serve(worker, clock, 32, 20, steep)) == {8}
    acceptance = worker.adaptive_controller.budget.acceptance.expected()
    assert [acceptance[n] for n in (8, 16, 32)] == pytest.approx([2.0, 3.0, 4.0], rel=0.02)
    assert len(worker.server_args._runtime_mutations) == 1
    assert len(worker.applied) < 30


def test_batches_are_told_apart_by_their_graphs() -> None:
    worker = start(batches=(1, 8, 33))
    assert [worker.adaptive_controller._padded(n) for n in (1, 2, 8, 9, 33, 40)] == [1, 8, 8, 33, 33, 40]
    eager = start(batches=())
    assert [eager.adaptive_controller._padded(n) for n in (1, 3)] == [1, 3]


def test_rounds_without_drafts(clock: Any) -> None:
    worker = start((1, 8))
    assert worker.built == [(5, 8), (0, 1)]
    assert set(serve(worker, clock, 32, 200, {1: 4000.0, 8: 20000.0, 32: 80000.0})[100:]) == {1}
    assert set(serve(worker, clock, 1, 200, {1: 4000.0, 8: 5000.0, 32: 9000.0})[100:]) == {8}


def test_a_prompt_between_two_rounds_is_not_timed(clock: Any) -> None:
    worker = start()
    flat = dict.fromkeys((8, 16, 32), 5000.0)
    serve(worker, clock, 1, 3, flat)
    for _ in range(4):
        clock.now += 1.0
        forward_batch(lambda w, b: w.forward_batch_generation(b), worker, batch_of(3, prompt=True))
        serve(worker, clock, 1, 40, flat)
    times = worker.adaptive_controller.budget.times
    assert times.median(1, 32) == times.median(1, 8) == pytest.approx(5000.0)
    assert times.median(1, 16) is None  # takes no less than 8 nodes and brings less than 32
    assert all(us == pytest.approx(5000.0) for seen in times._seen[1].values() for us in seen)


def test_results_that_do_not_fit_their_round_are_left_out(clock: Any) -> None:
    worker = start()
    controller = worker.adaptive_controller
    controller.on_verify_complete([1, 1], 2)  # none was started
    forward_batch(lambda w, b: w.forward_batch_generation(b), worker, batch_of(2))
    controller.on_verify_complete([], 0)
    controller.on_verify_complete([1, 1, 1], 3)
    assert controller.budget.acceptance.expected()[32] == 0.0
    for _ in range(20):  # nobody reads
        forward_batch(lambda w, b: w.forward_batch_generation(b), worker, batch_of(2))
    assert len(controller._open) <= 8
    forward_batch(lambda w, b: None, worker, batch_of(0))


def test_the_drafter_s_sums_are_those_of_the_best_nodes() -> None:
    torch.manual_seed(0)
    sums = DraftedSums((2, 8, 32), "cpu")
    scores = [torch.rand(3, 1, TOPK), *(torch.rand(3, TOPK, TOPK) / (2 + n) for n in range(2))]
    flat = torch.cat(scores, 1).flatten(1)
    seen: list[Any] = []
    drafted.install(sums)
    assert organize(lambda *a, **k: seen.append((a, k)), scores, 1, 2, num_draft_token=8) is None
    assert seen == [((scores, 1, 2), {"num_draft_token": 8})]
    for column, nodes in enumerate((2, 8, 32)):
        want = flat.sort(descending=True).values[:, : nodes - 1].sum(1)
        torch.testing.assert_close(sums.buffer[:3, column], want)
    few = [torch.rand(3, 1, TOPK)]  # a shallower draft has fewer nodes than the largest tree
    organize(lambda *a: None, few, [], [], 2)
    torch.testing.assert_close(sums.buffer[:3, 2], few[0].sum((1, 2)))
    organize(lambda *a: None, [torch.rand(4097, 1, TOPK)], [], [], 2)  # more requests than there are rows
    torch.testing.assert_close(sums.buffer[:3, 2], few[0].sum((1, 2)))


def test_costs_of_a_file_come_before_the_first_rounds(clock: Any, tmp_path: Path) -> None:
    entries = [
        Timing(batch=b, kv=1000, depth=5, nodes=n, median_us=5000.0 + 20.0 * b * n, spread_us=0.0, repeats=1)
        for b in (1, 32) for n in (1, 8, 32)
    ]  # fmt: skip
    save_calibration(
        CalibrationTable(entries, name="m", device="d", date="2026-01-01"), tmp_path / "costs.json"
    )  # fmt: skip
    worker = start((8, 16), str(tmp_path / "costs.json"))
    us = {n: 7000.0 + 20.0 * 32 * n for n in (8, 16, 32)}
    ran = serve(worker, clock, 32, 200, us)
    assert set(ran[100:]) == {8}
    assert ran.count(32) + ran.count(16) < 30
    assert worker.adaptive_controller._costs.kv == 100
    costs = FileCosts.read(str(tmp_path / "costs.json"))
    assert costs(1, 20) == pytest.approx(5400.0)
    assert costs(64, 8) is None
    assert costs(1, 64) is None
    (tmp_path / "bad.json").write_text("{}")
    for wrong in ("bad.json", "none.json"):
        with pytest.raises(NotServed, match="BOLE_SGLANG_BUDGET_COSTS"):
            FileCosts.read(str(tmp_path / wrong))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ((8, 64), "64 is more than --speculative-num-draft-tokens 32"),
        ((32,), "expected 2 to 6 different numbers"),
        ((8, 10, 12, 14, 16, 18), "expected 2 to 6 different numbers"),
    ],
)
def test_numbers_that_cannot_be_are_refused(given: tuple[int, ...], match: str) -> None:
    with pytest.raises(NotServed, match=match):
        node_candidates(given, Worker())


def test_trees_shallower_than_the_steps_need_room() -> None:
    worker = Worker()
    assert node_candidates((4, 8), worker) == (4, 8, 32)
    worker.page_size = 64
    with pytest.raises(NotServed, match=r"4 draft tokens take 3 of 5 steps.*page size 1"):
        node_candidates((4, 8), worker)
    worker.page_size, worker.speculative_num_draft_tokens = 1, 16
    with pytest.raises(NotServed, match="at least steps x topk = 20"):
        node_candidates((4, 8), worker)
    assert node_candidates("auto", worker) == (8, 16)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tp_size": 2}, "tp_size above 1"),
        ({"dp_size": 2}, "dp_size above 1"),
        ({"enable_dp_attention": True}, "data-parallel attention"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"enable_two_batch_overlap": True}, "two-batch overlap"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(NotServed, match=match):
        check_worker(Worker(**change))


def test_chains_and_other_drafters_are_refused() -> None:
    worker = Worker()
    worker.topk = 1
    with pytest.raises(NotServed, match="SGLang's --speculative-adaptive"):
        check_worker(worker)
    with pytest.raises(NotServed, match="drafts with NGRAM"):
        check_algorithm(SimpleNamespace(name="NGRAM"))


@pytest.mark.parametrize("on", [False, True])
def test_the_worker_gets_a_controller_where_it_is_wanted(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOLE_SGLANG_BUDGET", "auto" if on else "0")
    monkeypatch.setattr(budget, "served", lambda config: True)
    worker: Any = Worker.__new__(Worker)
    worker_init(lambda w, **more: Worker.__init__(w), worker, gpu_id=0)
    assert isinstance(worker.adaptive_controller, BudgetController) is on
    monkeypatch.setattr(budget, "served", lambda config: False)  # no recurrent layers: not Bole's
    worker_init(lambda w: Worker.__init__(w), worker)
    assert worker.adaptive_controller is None
    assert forward_batch(lambda w, b, **more: (b, more), worker, 3, on_publish=4) == (3, {"on_publish": 4})


def test_a_hook_of_the_budget_that_is_not_set_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from bole_runtime.integrations.sglang.seams import CHANGED

    made = ModuleType("sglang.srt.plugins.hook_registry")
    made.HookRegistry = SimpleNamespace(_patched={s.target for s in CHANGED})  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.delenv("BOLE_SGLANG_BUDGET", raising=False)
    served._check_hooks()
    monkeypatch.setenv("BOLE_SGLANG_BUDGET", "auto")
    with pytest.raises(NotServed, match="organize_draft_results"):
        served._check_hooks()


def test_lines_of_switches_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    start()
    logger = logging.getLogger(__name__)  # of the module that the worker's class is in
    with caplog.at_level(logging.INFO):
        logger.info("Switch adaptive runtime state: steps -1 -> 5")
        logger.info("Built adaptive runtime state")
    assert [r.message for r in caplog.records if r.name == __name__] == ["Built adaptive runtime state"]
