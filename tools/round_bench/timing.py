"""Times whole rounds: replays of captured graphs in blocks of a cycle, interleaved."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bole_codegen.measure import LayerGraph


@dataclass(frozen=True)
class RoundTime:
    """Microseconds of a round: median over blocks, and the quartiles' distance."""

    median_us: float
    spread_us: float


def summarise(blocks: list[float], cycle: int) -> RoundTime:
    """Return the time of a round from the times of blocks of ``cycle`` rounds."""
    each = sorted(b / cycle for b in blocks)
    if len(each) < 2:
        return RoundTime(each[0], 0.0)
    first, _, third = statistics.quantiles(each, n=4)
    return RoundTime(statistics.median(each), third - first)


def time_rounds(graphs: Mapping[str, tuple[LayerGraph, int]], replays: int) -> dict[str, RoundTime]:
    """Time graphs of whole rounds, block by block in an order that rotates.

    A deferred commit writes states in some rounds only, so a block is a whole cycle, and its rounds share its time.

    Args:
        graphs: name to (graph, rounds of a cycle).
        replays: blocks of each.
    """
    names = list(graphs)
    for name in names:
        for _ in range(2 * graphs[name][1]):
            graphs[name][0].replay()
    torch.cuda.synchronize()
    blocks: dict[str, list[float]] = {name: [] for name in names}
    for n in range(replays):
        spans = []
        graphs[names[0]][0].replay()  # keeps the device busy while the host enqueues
        if graphs[names[0]][1] > 1:
            for _ in range(graphs[names[0]][1] - 1):
                graphs[names[0]][0].replay()
        for name in names[n % len(names) :] + names[: n % len(names)]:
            graph, cycle = graphs[name]
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(cycle):
                graph.replay()
            end.record()
            spans.append((name, start, end))
        torch.cuda.synchronize()
        for name, start, end in spans:
            blocks[name].append(start.elapsed_time(end) * 1e3)
    return {name: summarise(blocks[name], graphs[name][1]) for name in names}
