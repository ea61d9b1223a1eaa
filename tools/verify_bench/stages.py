"""Split a candidate's time by kernel, without a hardware profiler: CUPTI timestamps through torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from bole_codegen.measure import capture_layers
from bole_runtime.kernels.loader import LoadedKernel


@contextmanager
def one_by_one() -> Iterator[None]:
    """Launch Bole's kernels without programmatic launches meanwhile: each starts when the one before it has ended."""
    launch = LoadedKernel.launch

    def plain(self: LoadedKernel, grid: tuple[int, ...], args: tuple[object, ...]) -> None:
        options = {name: value for name, value in self.plan.options.items() if name != "launch_pdl"}
        self.function[grid](*args, **options)

    LoadedKernel.launch = plain  # type: ignore[method-assign]
    try:
        yield
    finally:
        LoadedKernel.launch = launch  # type: ignore[method-assign]


def split(make_layer: Callable[[int], Callable[[], object]], layers: int, replays: int = 3) -> dict[str, float]:
    """Return kernel name to microseconds a layer, summed over its launches in replays of a graph of its own.

    A kernel that was launched early would count the time that it waits, so here none is: what kernels save by
    overlapping is the difference between their sum and the measured time. Empty where the profiler reports no kernels.
    """
    from torch.profiler import ProfilerActivity, profile

    cuda = [ProfilerActivity.CUDA]
    with one_by_one(), capture_layers(make_layer, layers) as graph, profile(activities=cuda) as recorded:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    totals: dict[str, float] = {}
    for event in recorded.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name] = totals.get(event.name, 0.0) + event.time_range.elapsed_us()
    return {name: total / (replays * layers) for name, total in sorted(totals.items(), key=lambda t: -t[1])}
