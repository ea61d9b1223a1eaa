"""Timing by the benchmark protocol: many layers in one CUDA graph, median of replays, divided by the layers.

A graph removes the launch gaps that a serving engine does not have either, and layers with tensors of their own
keep the recurrent states cold in L2. Replays are queued back to back, so the host is never inside a measured span.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

# Constructors of streams and events carry no annotations in some torch versions.
_cuda: Any = torch.cuda

#: Enqueues the work of one layer on the current stream.
Launch = Callable[[], object]


class CaptureError(RuntimeError):
    """The work of a candidate could not be warmed up or captured in a CUDA graph; the cause is chained and named."""


@dataclass(frozen=True)
class Timing:
    """Microseconds a layer.

    Attributes:
        median_us: median over the replays.
        spread_us: distance between the first and third quartile.
        min_us: fastest replay.
        layers: layers in the graph, the divisor.
        replays: number of timed replays.
    """

    median_us: float
    spread_us: float
    min_us: float
    layers: int
    replays: int

    @classmethod
    def from_samples(cls, total_us: list[float], layers: int) -> Timing:
        """Summarise whole-graph times in microseconds.

        Raises:
            ValueError: no samples, or ``layers`` is below one.
        """
        if not total_us or layers < 1:
            raise ValueError(f"a timing needs at least one sample and one layer, got {len(total_us)} and {layers}")
        per_layer = [t / layers for t in total_us]
        if len(per_layer) > 1:
            first, _, third = statistics.quantiles(per_layer, n=4, method="inclusive")
        else:
            first = third = per_layer[0]
        return cls(statistics.median(per_layer), third - first, min(per_layer), layers, len(per_layer))


class LayerGraph:
    """A captured CUDA graph of several layers. Use as a context manager, or call :meth:`close`.

    The callables, and through them the tensors, live as long as the graph does.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, launches: list[Launch], layers: int
    ) -> None:
        """Wrap a captured graph; use :func:`capture_layers`."""
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._launches = launches
        self.stream = stream
        self.layers = layers

    def replay(self) -> None:
        """Enqueue the graph on the current stream."""
        if self._graph is None:
            raise RuntimeError("this graph is closed")
        self._graph.replay()

    def close(self) -> None:
        """Wait for the device, then free the graph, its memory pool and the tensors that only it kept alive."""
        if self._graph is not None:
            torch.cuda.synchronize()
            self._graph.reset()
            self._graph = None
            self._launches = []

    def __enter__(self) -> LayerGraph:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("timing needs a CUDA device and none is available")


@contextlib.contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture on a stream. A capture that fails to end leaves nothing behind that later work would run into.

    Torch ends the part of its random generator and of its allocator only once the device has ended the capture.
    """
    device = torch.cuda.current_device()
    generator, pool = torch.cuda.default_generators[device], torch.cuda.graph_pool_handle()
    usual = generator.graphsafe_get_state()
    # What a graph captures with stays with it: a state of its own, that no other graph or eager call needs.
    generator.graphsafe_set_state(generator.clone_state())
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            yield
    except Exception:
        with contextlib.suppress(RuntimeError):  # it never began, or this torch has ended it
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        raise
    finally:
        generator.graphsafe_set_state(usual)


def capture_layers(
    make_layer: Callable[[int], Launch], layers: int, warmup: int = 2, layers_per_launch: int = 1
) -> LayerGraph:
    """Capture one graph that runs ``layers`` different layers in sequence.

    Args:
        make_layer: called with 0 .. layers-1; returns a callable that enqueues that layer's work and nothing else
            (no host synchronisation; allocations go to the graph's pool).
        layers: number of layers.
        warmup: eager runs of every layer before the capture, on a side stream. The first compiles.
        layers_per_launch: layers that one callable serves (a commit of all layers at once); times are divided by them.

    Raises:
        ValueError: a count is below one.
        CaptureError: a warm-up or the capture failed; ``__cause__`` is the original exception.
        RuntimeError: there is no CUDA device.
    """
    if layers < 1 or warmup < 1 or layers_per_launch < 1:
        raise ValueError(
            f"layers, warmup and layers_per_launch must be at least 1, got {layers}, {warmup}, {layers_per_launch}"
        )
    _require_cuda()
    launches = [make_layer(i) for i in range(layers)]
    before = torch.cuda.current_stream()
    stream: torch.cuda.Stream = _cuda.Stream()
    stream.wait_stream(before)
    step = "warm-up"
    graph = torch.cuda.CUDAGraph()
    cause: Exception | None = None
    try:
        with torch.cuda.stream(stream):
            for _ in range(warmup):
                for launch in launches:
                    launch()
        stream.synchronize()
        step = "capture"
        with _capturing(graph, stream):
            try:
                for launch in launches:
                    launch()
            except Exception as error:
                # Not raised before the capture has ended, which may work and leaves torch as it was. Where it does not,
                # its error says nothing about the cause.
                cause = error
        if cause is not None:
            raise cause
        step = "first replay"
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:
        # A capture that fails to end leaves its stream current.
        torch.cuda.set_stream(before)
        cause = cause or error
        raise CaptureError(f"{step} failed: {type(cause).__name__}: {cause}") from cause
    return LayerGraph(graph, stream, launches, layers * layers_per_launch)


def _rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def time_interleaved(
    graphs: Mapping[str, LayerGraph], replays: int = 20, warmup_ms: float = 20.0, batch: int = 16
) -> dict[str, Timing]:
    """Time several graphs in one run, one replay of each in turn, in an order that rotates.

    Clock and temperature drift then touch all candidates alike.

    Args:
        graphs: name to captured graph.
        replays: timed replays of each graph, at least 10 for a number that is reported.
        warmup_ms: run all graphs for about this long first, so that clocks settle.
        batch: rounds enqueued between two host synchronisations.

    Returns:
        Name to :class:`Timing`, in the order given.

    Raises:
        ValueError: no graphs, or ``replays`` below one.
    """
    if not graphs or replays < 1:
        raise ValueError(f"need at least one graph and one replay, got {len(graphs)} and {replays}")
    _require_cuda()
    names = list(graphs)
    begin = time.perf_counter()
    while True:
        for name in names:
            graphs[name].replay()
        torch.cuda.synchronize()
        if (time.perf_counter() - begin) * 1e3 >= warmup_ms:
            break
    samples: dict[str, list[float]] = {name: [] for name in names}
    done = 0
    while done < replays:
        rounds = min(batch, replays - done)
        spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        # An untimed replay keeps the device busy while the host enqueues, so that no measured span holds a launch gap.
        graphs[names[0]].replay()
        for r in range(rounds):
            for name in _rotated(names, done + r):
                start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
                start.record()
                graphs[name].replay()
                end.record()
                spans.append((name, start, end))
        torch.cuda.synchronize()
        for name, start, end in spans:
            samples[name].append(start.elapsed_time(end) * 1e3)
        done += rounds
    return {name: Timing.from_samples(samples[name], graphs[name].layers) for name in names}


def time_launches(
    make_layer: Callable[[int], Launch], layers: int, replays: int = 20, warmup: int = 2, warmup_ms: float = 5.0
) -> Timing:
    """Capture ``layers`` layers in one CUDA graph and time its replays.

    Args:
        make_layer: see :func:`capture_layers`.
        layers: number of different layers, enough for a cold L2: see ``layers_for_cold_l2``.
        replays: timed replays.
        warmup: eager runs of each layer before the capture.
        warmup_ms: run the graph for about this long before the timed replays.

    Returns:
        Microseconds a layer.

    Raises:
        CaptureError: the work could not be run or captured.
    """
    with capture_layers(make_layer, layers, warmup) as graph:
        return time_interleaved({"": graph}, replays, warmup_ms)[""]


def host_overhead_us(call: Launch, calls: int = 50, batches: int = 20) -> Timing:
    """Time the host side of an eager call: microseconds until it returns, device work not awaited.

    Args:
        call: enqueues work; at most a few kernels, since a full launch queue would block the host.
        calls: calls between two synchronisations.
        batches: number of samples.

    Returns:
        A :class:`Timing` with ``layers = calls``, so that its fields are microseconds a call.
    """
    on_cuda = torch.cuda.is_available()
    for _ in range(3):
        call()
    samples: list[float] = []
    for _ in range(batches):
        if on_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - begin) * 1e6)
    if on_cuda:
        torch.cuda.synchronize()
    return Timing.from_samples(samples, calls)
