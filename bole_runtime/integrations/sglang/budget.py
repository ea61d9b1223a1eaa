"""The number of nodes a request, chosen for every round: in the place of SGLang's controller of adaptive speculation.

SGLang's controller keeps, for several numbers of drafting steps, the attention backends and CUDA graphs of drafting,
verification and draft extension, and swaps them between rounds. It does so for chains. A worker takes any object with
its methods; the one here keeps such a state for several numbers of draft tokens of a tree.
"""

from __future__ import annotations

import bisect
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from bole_runtime.budget.online import OnlineBudget
from bole_runtime.budget.round_times import RoundClock, RoundTimes
from bole_runtime.integrations.sglang.budget_checks import check_worker, depths_of, node_candidates
from bole_runtime.integrations.sglang.budget_costs import FileCosts
from bole_runtime.integrations.sglang.drafted import DraftedSums, install
from bole_runtime.integrations.sglang.options import Options, read_options
from bole_runtime.integrations.sglang.served import served

logger = logging.getLogger(__name__)

#: No state has so many steps: SGLang applies a state only if its steps are others than the worker's.
_NO_STEPS = -1
_SWITCH = "adaptive_spec.restore"


class _Round(NamedTuple):
    """A round that was started, and not yet accepted on the host."""

    nodes: int
    rows: int
    drafted: torch.Tensor | None


class BudgetController:
    """Stands where SGLang's ``AdaptiveController`` stands in an ``EAGLEWorkerV2``.

    Args:
        worker: SGLang's.
        candidates: draft tokens, ascending; the last one is the worker's own.
        estimate: of a forward by batch, nodes and context length; None to measure alone.
    """

    def __init__(self, worker: Any, candidates: Sequence[int], estimate: FileCosts | None = None) -> None:
        self.worker, self.candidates = worker, tuple(candidates)
        depths = depths_of(candidates, worker.speculative_num_steps)
        self._steps = dict(zip(self.candidates, depths, strict=True))
        self._costs = estimate
        self.budget = OnlineBudget(self.candidates, depths, RoundTimes(estimate))
        self.clock = RoundClock()
        self.drafted = DraftedSums(self.candidates, worker.device)
        self._states: dict[int, Any] = {}
        self._graph_batches: list[int] = []
        self._open: deque[_Round] = deque()
        self._report_at: dict[int, int] = {}

    # What an EAGLEWorkerV2 calls.

    def register(self, state: Any, steps: int | None = None) -> None:
        """Take the state that the worker started with."""
        self._states[state.speculative_num_draft_tokens] = state

    def init_states(self, cuda_graph_bs: list[int] | None = None) -> None:
        """Make the states of the other candidates, which fit in the factors of the worker's own, the largest."""
        # Of the graphs that there are: SGLang drops and adds sizes of those that were asked for.
        runner = getattr(self._states[self.candidates[-1]], "target_graph_runner", None)
        self._graph_batches = sorted(getattr(runner, "capture_bs", None) or cuda_graph_bs or ())
        for nodes in reversed(self.candidates):
            if nodes not in self._states:
                self._states[nodes] = self.worker.build_adaptive_runtime_state(
                    speculative_num_steps=self._steps[nodes], speculative_num_draft_tokens=nodes
                )
        self._activate(self.worker.speculative_num_draft_tokens)

    def activate_step_by_batch(self, batch_size: int) -> None:
        """Choose the nodes of the round that begins; called before it is drafted."""
        if batch_size == 0:
            return
        padded = self._padded(batch_size)
        nodes = self.budget.choose(padded)
        seconds = self.clock.start(padded, nodes, time.perf_counter())
        if seconds is not None:
            self.budget.times.observe(padded, nodes, 1e6 * seconds)
        self._activate(nodes)
        self._report(padded)

    def on_verify_complete(self, num_correct_drafts_per_req: Sequence[int], batch_size: int = 0) -> None:
        """Take what a round accepted; with overlap the next one is already running."""
        count = len(num_correct_drafts_per_req)
        if not self._open or count == 0:
            return
        done = self._open.popleft()
        if done.rows != count:
            self._open.clear()  # a round of another batch: which one this was is not known
            return
        drafted = None if done.drafted is None else done.drafted.tolist()
        self.budget.acceptance.observe(done.nodes, sum(num_correct_drafts_per_req) / count, drafted)

    # What the hook around a forward calls.

    def interrupt(self) -> None:
        """A prompt is read between two rounds."""
        self.clock.interrupt()

    def begin(self, batch: Any) -> None:
        """Note how long the texts are, where costs depend on it."""
        if self._costs is not None and batch.reqs:
            lengths = [len(r.origin_input_ids) + len(r.output_ids) for r in batch.reqs]
            self._costs.kv = max(sum(lengths) // len(lengths), 1)

    def launched(self, rows: int) -> None:
        """Note the round that was just started, and what its drafter expected of every number of nodes."""
        if rows == 0:
            return
        nodes = self.worker.speculative_num_draft_tokens
        self._open.append(_Round(nodes, rows, self._means(rows) if self._steps[nodes] else None))
        if len(self._open) > 8:  # nobody reads them: results of this kind do not come
            self._open.popleft()

    def _means(self, rows: int) -> torch.Tensor | None:
        buffer = self.drafted.buffer
        if rows > buffer.shape[0]:
            return None
        means = buffer[:rows].mean(0)
        if not means.is_cuda:
            return means
        # Arrives before the round's accepted tokens do, which are copied later on the same stream or behind it.
        host = torch.empty(means.shape, dtype=means.dtype, pin_memory=True)
        return host.copy_(means, non_blocking=True)

    def _padded(self, batch: int) -> int:
        """Return the rows of the graph that a batch runs in."""
        at = bisect.bisect_left(self._graph_batches, batch)
        return self._graph_batches[at] if at < len(self._graph_batches) else batch

    def _activate(self, nodes: int) -> None:
        if nodes == self.worker.speculative_num_draft_tokens:
            return
        self.worker.speculative_num_steps = _NO_STEPS
        self.worker.apply_runtime_state(self._states[nodes])
        _forget_switches(self.worker.server_args)

    def _report(self, batch: int) -> None:
        """Say what was chosen, ever more seldom."""
        rounds = dict(sorted(self.budget.rounds[batch].items()))
        if sum(rounds.values()) < self._report_at.setdefault(batch, 64):
            return
        self._report_at[batch] *= 2
        medians = {n: self.budget.times.median(batch, n) for n in self.candidates}
        logger.info(
            "bole: %d requests: rounds by draft tokens %s; ms a round %s; accepted drafts expected %s",
            batch, rounds, {n: round(us / 1e3, 2) for n, us in medians.items() if us is not None},
            {n: round(a, 2) for n, a in self.budget.acceptance.expected().items()},
        )  # fmt: skip


def _forget_switches(server_args: Any) -> None:
    """Keep the last switch alone in SGLang's records of changed arguments, which would grow with every one."""
    context = getattr(sys.modules.get("sglang.srt.runtime_context"), "get_context", lambda: None)()
    for holder, name in (
        (server_args, "_runtime_mutations"), (server_args, "_resolved_overrides"),  # 0.5.16
        (context, "_overrides_log"),  # 0.5.23
    ):  # fmt: skip
        log = getattr(holder, name, None)
        if isinstance(log, list) and len(log) > 1 and log[-1][0] == log[-2][0] == _SWITCH:
            del log[-2]


def _quiet(record: logging.LogRecord) -> bool:
    """Leave out SGLang's line for every switch, of which there may be several a second."""
    return "Switch adaptive runtime state" not in str(record.msg)


def worker_init(original: Callable[..., None], worker: Any, *args: Any, **arguments: Any) -> None:
    """Around ``EAGLEWorkerV2.__init__``: puts the controller in its place, before any graph is captured.

    Raises:
        NotServed: an option of the engine does not go with the budget.
    """
    original(worker, *args, **arguments)
    options = read_options()
    if not options.budget or not served(worker._target_worker.model_runner.model_config):
        return
    worker.adaptive_controller = make_controller(worker, options)


def make_controller(worker: Any, options: Options) -> BudgetController:
    """Return the controller of a worker, checked.

    Raises:
        NotServed: an option of the engine does not go with the budget.
    """
    check_worker(worker)
    candidates = node_candidates(options.budget, worker)
    estimate = FileCosts.read(options.budget_costs) if options.budget_costs else None
    # 0.5.16 computes and keeps it when it is first asked for: it must be that of the largest number.
    getattr(worker.server_args, "max_speculative_num_draft_tokens", None)
    controller = BudgetController(worker, candidates, estimate)
    install(controller.drafted)
    logging.getLogger(type(worker).__module__).addFilter(_quiet)
    logger.info("bole: budget: %s draft tokens, %s", candidates, options.budget_costs or "measured while serving")
    return controller


def forward_batch(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **more: Any) -> Any:
    """Around ``EAGLEWorkerV2.forward_batch_generation``: rounds are counted and timed, prompts interrupt them."""
    controller = getattr(worker, "adaptive_controller", None)  # subclasses may make none
    if not isinstance(controller, BudgetController):
        return original(worker, batch, *args, **more)
    if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
        controller.interrupt()
        return original(worker, batch, *args, **more)
    rows = batch.seq_lens.shape[0]
    controller.begin(batch)
    result = original(worker, batch, *args, **more)
    controller.launched(rows)
    return result
