"""What a budget goes with, and the numbers of draft tokens that there can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bole_runtime.integrations.sglang.options import BUDGET, BUDGET_AUTO
from bole_runtime.integrations.sglang.served import NotServed

#: Each number has graphs of its own for drafting, verification and draft extension.
MOST_CANDIDATES = 6
_AUTO_CANDIDATES = 4
_REFUSED = {
    "enable_dp_attention": "data-parallel attention: ranks would choose different numbers",
    "enable_multi_layer_eagle": "multi-layer EAGLE, whose worker has no states to switch",
    "enable_two_batch_overlap": "two-batch overlap, whose attention backend a switch would discard",
    "enable_pdmux": "PD multiplexing, whose attention backends a switch does not reach",
    "speculative_adaptive": "--speculative-adaptive, which takes the same place; choose one",
}


def check_algorithm(algorithm: Any) -> None:
    """Refuse drafters other than EAGLE's, before memory is sized.

    Raises:
        NotServed: SGLang runs another worker.
    """
    name = str(getattr(algorithm, "name", algorithm))
    if name not in ("EAGLE", "EAGLE3"):
        raise NotServed(f"{BUDGET}: chooses draft tokens of EAGLE, EAGLE3 and NEXTN; this engine drafts with {name}")


def check_worker(worker: Any) -> None:
    """Refuse options of the engine that do not go with a budget.

    Raises:
        NotServed: names the option.
    """
    arguments = worker.server_args
    check_algorithm(worker.speculative_algorithm)
    for name, why in _REFUSED.items():
        if getattr(arguments, name, False):
            raise NotServed(f"{BUDGET}: not served with {why}")
    for name in ("tp_size", "pp_size", "dp_size"):
        if int(getattr(arguments, name, 1) or 1) > 1:
            raise NotServed(f"{BUDGET}: not served with {name} above 1: every rank would choose from its own times")
    if worker.topk < 2:
        raise NotServed(
            f"{BUDGET}: chooses the nodes of trees; chains (--speculative-eagle-topk 1) have as many as steps, which "
            "SGLang's --speculative-adaptive changes"
        )


def node_candidates(given: Sequence[int] | str, worker: Any) -> tuple[int, ...]:
    """Return the numbers of draft tokens, ascending; the engine's own is the last.

    Args:
        given: of the environment; ``auto`` for the engine's own and its halves.
        worker: SGLang's.

    Raises:
        NotServed: a number is too large or too small, or there are too many or too few.
    """
    most, steps = worker.speculative_num_draft_tokens, worker.speculative_num_steps
    if given == BUDGET_AUTO:
        halves = [most >> n for n in range(_AUTO_CANDIDATES)]
        made = {n for n in halves if n == most or n > steps}
    else:
        made = {*(int(n) for n in given), most}
    if max(made) > most:
        raise NotServed(f"{BUDGET}: {max(made)} is more than --speculative-num-draft-tokens {most}")
    if not 2 <= len(made) <= MOST_CANDIDATES:
        raise NotServed(f"{BUDGET}: {sorted(made)} draft tokens; expected 2 to {MOST_CANDIDATES} different numbers")
    least = min(made)
    if least <= steps and (most < steps * worker.topk or worker.page_size > 1):
        # SGLang reserves keys and values for the steps of the state before; a shallower one must not reserve less.
        raise NotServed(
            f"{BUDGET}: {least} draft tokens take {least - 1} of {steps} steps, which is served with page size 1 and "
            f"at least steps x topk = {steps * worker.topk} --speculative-num-draft-tokens; else take more than {steps}"
        )
    return tuple(sorted(made))


def depths_of(candidates: Sequence[int], steps: int) -> list[int]:
    """Return the drafting steps of each number: a tree is no deeper than it has drafts."""
    return [min(steps, n - 1) for n in candidates]
