"""The two ways to evaluate candidates: on the GPU that is present, or by compiling for one that is not."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from bole_codegen.search import roofline
from bole_codegen.search.pool import Job, Pool
from bole_codegen.search.results import Failed, KernelResources, Measurement, Screened, Screening, Timed
from bole_codegen.search.targets import Target, class_of
from bole_runtime.gpus import GpuRecord
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, Variant

VariantOf = Callable[[str, str], Variant]
Stop = Callable[[], bool]
#: Seconds for a candidate to compile and pass its check.
SCREEN_LIMIT = 150.0
#: Seconds for a quick timing. Drawing the inputs of a bucket counts in.
QUICK_LIMIT = 60.0
FINALS_LIMIT = 180.0


class Evaluator(Protocol):
    """What the driver needs of an evaluator."""

    label: Literal["measured", "predicted"]
    workers: int

    @property
    def bandwidth_gbs(self) -> float | None:
        """Bandwidth that floors are computed from, None before it is known."""

    def start(self) -> None:
        """Start every process, so that it is ready when the first candidate is."""

    def screen(
        self, jobs: Sequence[tuple[Problem, Config]], done: Callable[[int, Screening], None], stop: Stop
    ) -> None:
        """Compile, and check where a device is present. Calls ``done`` as candidates finish; stops when told to."""

    def quick(
        self, target: Target, configs: Sequence[Config], done: Callable[[Config, Measurement], None], stop: Stop
    ) -> None:
        """Time screened candidates in one bucket, cheaply."""

    def finals(self, target: Target, configs: Sequence[Config]) -> dict[Config, Measurement]:
        """Time finalists against each other. Those that fail now do not count."""

    def floor_us(self, target: Target) -> float:
        """Return the memory floor of a bucket."""

    def close(self) -> None:
        """Release every process."""


class MeasuredEvaluator:
    """Checks in many workers, times in one, all on the same device.

    Args:
        record: the GPU.
        device: CUDA index.
        seed: of all inputs.
        workers: processes that compile and check; default, one a core less one.
        replays: of a final timing.
        log: file for what candidates print.
        factory: bench class, for tests.
    """

    label: Literal["measured", "predicted"] = "measured"

    def __init__(
        self,
        record: GpuRecord,
        device: int = 0,
        seed: int = 0,
        workers: int | None = None,
        replays: int = 20,
        log: str | None = None,
        factory: str = "bole_codegen.search.gpu_bench:GpuBench",
    ) -> None:
        self.workers = workers or max(1, (os.cpu_count() or 2) - 1)
        self._replays = replays
        options: dict[str, Any] = {"device": device, "seed": seed, "l2_bytes": record.l2_bytes}
        self._screeners = Pool(factory, options, self.workers, log)
        self._timer = Pool(factory, options, 1, log)
        self._bandwidth: float | None = None
        self._floors: dict[Target, float] = {}

    def start(self) -> None:
        """See :class:`Evaluator`."""
        self._screeners.start()
        self._timer.start()

    def screen(
        self, jobs: Sequence[tuple[Problem, Config]], done: Callable[[int, Screening], None], stop: Stop
    ) -> None:
        """See :class:`Evaluator`."""
        work = [Job("screen", job, SCREEN_LIMIT, i) for i, job in enumerate(jobs)]
        self._screeners.run(work, lambda job, result: done(job.tag, result), stop)

    def quick(
        self, target: Target, configs: Sequence[Config], done: Callable[[Config, Measurement], None], stop: Stop
    ) -> None:
        """See :class:`Evaluator`."""
        work = [Job("quick", (target, config), QUICK_LIMIT, config) for config in configs]
        self._timer.run(work, lambda job, result: done(job.tag, result), stop)

    def finals(self, target: Target, configs: Sequence[Config]) -> dict[Config, Measurement]:
        """See :class:`Evaluator`."""
        configs = list(configs)
        times = self._finals(target, configs)
        if isinstance(times, Failed):
            # One of them broke the device: find it alone, then compare the others.
            alone = {c: self._finals(target, [c]) for c in configs}
            bad = {c: t if isinstance(t, Failed) else t[0] for c, t in alone.items() if not _timed(t)}
            good = [c for c in configs if c not in bad]
            times = self._finals(target, good) if good else []
            if isinstance(times, Failed):
                times = [alone[c][0] for c in good]
            return {**bad, **dict(zip(good, times, strict=True))}
        return dict(zip(configs, times, strict=True))

    def _finals(self, target: Target, configs: list[Config]) -> Any:
        return self._timer.call("finals", target, configs, self._replays, limit=FINALS_LIMIT)

    def floor_us(self, target: Target) -> float:
        """See :class:`Evaluator`. At the copy bandwidth measured in this run."""
        if target not in self._floors:
            if self._bandwidth is None:
                measured = self._timer.call("bandwidth", limit=FINALS_LIMIT)
                if isinstance(measured, Failed):
                    raise RuntimeError(f"the copy bandwidth could not be measured: {measured.message}")
                self._bandwidth = float(measured)
            total = self._timer.call("floor_bytes", target, limit=FINALS_LIMIT)
            if isinstance(total, Failed):
                raise RuntimeError(f"{target.problem.key()}: {total.message}")
            self._floors[target] = total / self._bandwidth * 1e-3
        return self._floors[target]

    @property
    def restarts(self) -> int:
        """Workers that were replaced."""
        return self._screeners.restarts + self._timer.restarts

    @property
    def bandwidth_gbs(self) -> float | None:
        """Copy bandwidth measured in this run."""
        return self._bandwidth

    def close(self) -> None:
        """See :class:`Evaluator`."""
        self._screeners.close()
        self._timer.close()


def _timed(result: Any) -> bool:
    return not isinstance(result, Failed) and isinstance(result[0], Timed)


class OfflineEvaluator:
    """Compiles for the named GPU and ranks by the roofline model.

    Args:
        record: the GPU.
        variant_of: (op, name) -> declared variant.
        workers: compiling processes; default, one a core.
        log: file for what compilers print.
        factory: bench class, for tests.
    """

    label: Literal["measured", "predicted"] = "predicted"

    def __init__(
        self,
        record: GpuRecord,
        variant_of: VariantOf,
        workers: int | None = None,
        log: str | None = None,
        factory: str = "bole_codegen.search.compile_bench:CompileBench",
    ) -> None:
        self.workers = workers or max(1, os.cpu_count() or 2)
        self._record = record
        self._variant_of = variant_of
        self._pool = Pool(factory, {"gpu": record.key}, self.workers, log)
        self._resources: dict[tuple[Problem, Config], tuple[KernelResources, ...]] = {}

    def start(self) -> None:
        """See :class:`Evaluator`."""
        self._pool.start()

    def screen(
        self, jobs: Sequence[tuple[Problem, Config]], done: Callable[[int, Screening], None], stop: Stop
    ) -> None:
        """See :class:`Evaluator`."""

        def finished(job: Job, result: Screening) -> None:
            if isinstance(result, Screened):
                self._resources[jobs[job.tag]] = result.resources
            done(job.tag, result)

        self._pool.run([Job("screen", job, SCREEN_LIMIT, i) for i, job in enumerate(jobs)], finished, stop)

    def quick(
        self, target: Target, configs: Sequence[Config], done: Callable[[Config, Measurement], None], stop: Stop
    ) -> None:
        """See :class:`Evaluator`. The model takes no time, so nothing is left out."""
        del stop
        for config in configs:
            done(config, self._predict(target, config))

    def finals(self, target: Target, configs: Sequence[Config]) -> dict[Config, Measurement]:
        """See :class:`Evaluator`."""
        return {config: self._predict(target, config) for config in configs}

    def floor_us(self, target: Target) -> float:
        """See :class:`Evaluator`. At the nominal bandwidth."""
        return roofline.floor_us(target, self._record)

    def _predict(self, target: Target, config: Config) -> Measurement:
        key = (class_of(target.problem), config)
        if key not in self._resources:
            self.screen([key], lambda i, result: None, lambda: False)
        if key not in self._resources:
            return Failed("compile", "does not compile any more")
        variant = self._variant_of(target.problem.op, config.variant)
        return Timed(roofline.predict_us(target, config, variant, self._record, self._resources[key]), 0.0)

    @property
    def restarts(self) -> int:
        """Workers that were replaced."""
        return self._pool.restarts

    @property
    def bandwidth_gbs(self) -> float | None:
        """The nominal bandwidth."""
        return self._record.bandwidth_gbs

    def close(self) -> None:
        """See :class:`Evaluator`."""
        self._pool.close()
