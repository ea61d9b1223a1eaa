"""Split a candidate's time by kernel, without a hardware profiler: CUPTI timestamps through torch.profiler."""

from __future__ import annotations

import torch

from bole_codegen.measure import LayerGraph


def split(graph: LayerGraph, replays: int = 3) -> dict[str, float]:
    """Return kernel name to microseconds a layer, summed over its launches in replays of a captured graph.

    Kernels that overlap are each counted in full, so the sum may exceed the measured time. Empty where the profiler
    reports no kernels.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    totals: dict[str, float] = {}
    for event in recorded.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name] = totals.get(event.name, 0.0) + event.time_range.elapsed_us()
    return {name: total / (replays * graph.layers) for name, total in sorted(totals.items(), key=lambda t: -t[1])}
