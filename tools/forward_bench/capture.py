"""Steps as captured graphs for calibration, and their kernels compiled ahead by several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import torch

from bole_codegen.measure import CaptureError, LayerGraph, capture_layers
from bole_runtime.budget import Point
from forward_bench.model import Model, Shape, Step


class Forwards:
    """What ``calibrate`` asks for: the replay of a point's graph, or on a CPU the step itself.

    The graphs and caches of one batch and context are dropped when those of the next are asked for.
    """

    def __init__(self, model: Model, **options: Any) -> None:
        """Use a model; options are those of :class:`~forward_bench.model.Step`."""
        self._model, self._options = model, options
        self._group: tuple[int, int] | None = None
        self._open: list[LayerGraph] = []

    def __call__(self, point: Point) -> Callable[[], object] | None:
        """Prepare a point; None where memory does not suffice."""
        on_gpu = self._model.device.type == "cuda"
        try:
            if self._group != (point.batch, point.kv):
                self._group = None
                self.close()
                self._model.cache(point.batch, point.kv)
                self._group = point.batch, point.kv
            step = Step(self._model, point.batch, point.nodes, point.kv, point.depth, **self._options)
            if not on_gpu:
                return step
            self._open.append(capture_layers(lambda _: step, 1, warmup=1))
        except torch.cuda.OutOfMemoryError:
            return None
        except CaptureError as error:
            if isinstance(error.__cause__, torch.cuda.OutOfMemoryError):
                return None
            raise
        return self._open[-1].replay

    def close(self) -> None:
        """Free the graphs."""
        for graph in self._open:
            graph.close()
        self._open.clear()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()


def busy_timer(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Return a timer whose spans begin on a busy device: launching a graph of a thousand nodes is not in them.

    Serving engines launch the next step while the device still runs the one before.
    """
    filler = torch.zeros(4096, 4096, dtype=torch.bfloat16, device=device)

    def measure(run: Callable[[], object]) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(8):  # a millisecond or two
            torch.mm(filler, filler)
        first.record()
        run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3

    return measure


def _compile(
    shape: Shape, points: Sequence[Point], sizes: tuple[int, int], precision: str, options: Any, device: str
) -> int:
    """Run steps of few layers and a small vocabulary, whose recurrent kernels are those of the model's."""
    torch.set_num_threads(1)
    small = replace(shape, layers=shape.period, intermediate=256, vocabulary=1024)
    where = torch.empty(0, device=device).device
    model = Model(
        small, max_batch=sizes[0], max_nodes=sizes[1], dtype=torch.bfloat16, device=where,
        precision=precision,
    )  # fmt: skip
    for point in points:
        model.cache(point.batch, 64)
        Step(model, point.batch, point.nodes, 64, point.depth, **options)()
    if device != "cpu":
        torch.cuda.synchronize()
    return len(points)


class Ahead:
    """Processes that run every size once, so that the kernels are in Triton's cache before this process asks."""

    def __init__(
        self,
        shape: Shape,
        points: Sequence[Point],
        precision: str,
        options: dict[str, Any],
        jobs: int | None = None,
        device: str = "cuda",
    ) -> None:
        """Start them.

        Args:
            shape: of the model.
            points: sizes, whatever their context length.
            precision: of the recurrent layers.
            options: of the steps.
            jobs: processes; default one a core, 12 at most; with 0 nothing is compiled ahead.
            device: where they run.
        """
        count = min(len(points), 12, os.cpu_count() or 1) if jobs is None else min(jobs, len(points))
        self._pool: ProcessPoolExecutor | None = None
        self._work: list[Future[int]] = []
        if not count:
            return
        sizes = max(p.batch for p in points), max(p.nodes for p in points)
        self._pool = ProcessPoolExecutor(count, get_context("spawn"))
        for n in range(count):
            self._work.append(self._pool.submit(_compile, shape, points[n::count], sizes, precision, options, device))

    def wait(self) -> str:
        """Wait for them; returns what they did. Kernels of one that failed are compiled when they are needed."""
        done, failed = 0, []
        for work in self._work:
            try:
                done += work.result()
            except Exception as error:
                failed.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        if self._pool is not None:
            self._pool.shutdown()
        return f"kernels of {done} sizes compiled ahead" + (f"; failed: {failed[0]}" if failed else "")
