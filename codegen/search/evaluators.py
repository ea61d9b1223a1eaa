"""How candidates are evaluated: on the GPUs that are present, see ``offline.py`` for one that is not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from bole_codegen.measure.watch import Watch
from bole_codegen.search.compiler import Compiler, Render, spilled
from bole_codegen.search.kinds import kind_of
from bole_codegen.search.ledger import Ledger
from bole_codegen.search.pool import Job, Pool
from bole_codegen.search.results import PASSING_KINDS, Failed, Measurement, Screened, Screening, Timed
from bole_codegen.search.targets import Target
from bole_runtime.gpus import GpuRecord
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config
from bole_runtime.kernels.variants import get_variant

#: Seconds for a compiled candidate to pass its check; a check takes a small part of one.
CHECK_LIMIT = 45.0
#: Seconds for a quick timing. Drawing the inputs of a bucket counts in.
QUICK_LIMIT = 60.0
FINALS_LIMIT = 180.0
#: Checking processes of a device: one loads kernels while another runs.
CHECKERS = 2


class Evaluator(Protocol):
    """What the driver needs of an evaluator."""

    label: Literal["measured", "predicted"]
    workers: int
    ledger: Ledger

    @property
    def bandwidth_gbs(self) -> float | None:
        """Bandwidth that floors are computed from, None before it is known."""

    @property
    def devices(self) -> int:
        """Devices that classes are spread over."""

    def start(self) -> None:
        """Start every process, so that it is ready when the first candidate is."""

    async def screen(self, problem: Specialisation, config: Config, keep: bool = False) -> Screening:
        """Compile, and check the launch that is timed where a device is present.

        Args:
            problem: representative of a class.
            config: a valid configuration.
            keep: whether a candidate that spills counts all the same: others are compared with it.
        """

    async def confirm(self, problem: Specialisation, config: Config) -> Screening:
        """Check a candidate in full: fp32 output against the fp64 reference, every form of launch."""

    async def quick(self, target: Target, config: Config, device: int) -> Measurement:
        """Time a screened candidate in one bucket, cheaply."""

    async def finals(self, target: Target, configs: Sequence[Config], device: int) -> dict[Config, Measurement]:
        """Time finalists against each other. Those that fail now do not count."""

    async def floor_us(self, target: Target, device: int) -> float:
        """Return the memory floor of a bucket.

        Raises:
            RuntimeError: it cannot be measured; says why.
        """

    def close(self) -> None:
        """Release every process."""


class MeasuredEvaluator:
    """Compiles in many processes without a device, checks in a few, times in one process a device.

    Compiling and timing overlap: what uses a device takes turns through a lock, what compiles needs none.

    Args:
        record: the GPU.
        render: problem and configuration to kernels.
        devices: CUDA indices, all of that GPU.
        seed: of all inputs.
        workers: compiling processes; default, by cores.
        replays: of a final timing.
        log: file for what candidates print.
        locks: folder of device locks, None for none.
        factory: bench class, for tests.
        compiler: bench class of the compiling processes, for tests.
        watch: of the devices, in the same order; told when finalists were compared.
    """

    label: Literal["measured", "predicted"] = "measured"

    def __init__(
        self,
        record: GpuRecord,
        render: Render,
        devices: Sequence[int] = (0,),
        seed: int = 0,
        workers: int | None = None,
        replays: int = 20,
        log: str | None = None,
        locks: Path | None = None,
        factory: str = "bole_codegen.search.gpu_bench:GpuBench",
        compiler: str = "bole_codegen.search.compile_bench:CompileBench",
        watch: Watch | None = None,
    ) -> None:
        self.ledger = Ledger()
        self._watch = watch
        # The timing process of a device must never wait for a core.
        self.workers = workers or max(1, (os.cpu_count() or 2) - 2 * len(devices))
        self._replays = replays
        options: list[dict[str, Any]] = [
            {"device": d, "seed": seed, "l2_bytes": record.l2_bytes, "locks": locks} for d in devices
        ]
        self._compiler = Compiler(record.key, render, self.workers, log, self.ledger, compiler)
        self._checkers = Pool(factory, options * CHECKERS, len(options) * CHECKERS, log, self.ledger)
        self._timers = [Pool(factory, o, 1, log, self.ledger) for o in options]
        self.ledger.workers = {"compile": self.workers, "check": self._checkers.size, "time": len(options)}
        self._bandwidth: dict[int, float] = {}
        self._floors: dict[Target, float] = {}

    @property
    def devices(self) -> int:
        """See :class:`Evaluator`."""
        return len(self._timers)

    def start(self) -> None:
        """See :class:`Evaluator`."""
        for pool in (*self._timers, self._checkers, self._compiler.pool):
            pool.start()

    async def screen(self, problem: Specialisation, config: Config, keep: bool = False) -> Screening:
        """See :class:`Evaluator`."""
        compiled = await self._compiler.candidate(problem, config)
        if isinstance(compiled, Failed):
            return compiled
        failed = None if keep else spilled(compiled, get_variant(problem.op, config.variant).spills)
        if failed is not None:
            return failed
        result = await self._call(self._checkers, Job("gate", (problem, config), CHECK_LIMIT, "check"))
        return result if isinstance(result, Failed) else Screened(result, compiled)

    async def confirm(self, problem: Specialisation, config: Config) -> Screening:
        """See :class:`Evaluator`."""
        if kind_of(problem).widens(problem):
            compiled = await self._compiler.candidate(problem, config, wide=True)
            if isinstance(compiled, Failed):
                return compiled
        result = await self._call(self._checkers, Job("check", (problem, config), CHECK_LIMIT, "check"))
        return result if isinstance(result, Failed) else Screened(result)

    async def quick(self, target: Target, config: Config, device: int) -> Measurement:
        """See :class:`Evaluator`."""
        job = Job("quick", (target, config), QUICK_LIMIT, "draw")
        result: Measurement = await self._call(self._timers[device], job)
        return result

    async def finals(self, target: Target, configs: Sequence[Config], device: int) -> dict[Config, Measurement]:
        """See :class:`Evaluator`."""
        configs = list(configs)
        times = await self._finals(target, configs, device)
        if isinstance(times, Failed) and times.kind in PASSING_KINDS:
            return dict.fromkeys(configs, times)  # None ran: alone, each would wait as long.
        if isinstance(times, Failed):
            # One of them broke the device: find it alone, then compare the others.
            alone = {c: await self._finals(target, [c], device) for c in configs}
            bad = {c: t if isinstance(t, Failed) else t[0] for c, t in alone.items() if not _timed(t)}
            good = [c for c in configs if c not in bad]
            times = await self._finals(target, good, device) if good else []
            if isinstance(times, Failed):
                times = [alone[c][0] for c in good]
            return {**bad, **dict(zip(good, times, strict=True))}
        return dict(zip(configs, times, strict=True))

    async def _finals(self, target: Target, configs: list[Config], device: int) -> Any:
        job = Job("finals", (target, configs, self._replays), FINALS_LIMIT, "draw")
        result = await self._call(self._timers[device], job)
        if self._watch is not None:
            await self._watch.compared(device)
        return result

    async def _call(self, pool: Pool, job: Job) -> Any:
        """Run a job, once more if its process was killed from outside."""
        result = await pool.call(job)
        if isinstance(result, Failed) and result.kind == "killed":
            result = await pool.call(job)
        return result

    async def floor_us(self, target: Target, device: int) -> float:
        """See :class:`Evaluator`. At the copy bandwidth measured in this run on that device."""
        if target not in self._floors:
            timer = self._timers[device]
            if device not in self._bandwidth:
                measured = await self._call(timer, Job("bandwidth", (), FINALS_LIMIT))
                if isinstance(measured, Failed):
                    raise RuntimeError(f"the copy bandwidth could not be measured: {measured.message}")
                self._bandwidth.setdefault(device, float(measured))
            total = await self._call(timer, Job("floor_bytes", (target,), FINALS_LIMIT))
            if isinstance(total, Failed):
                raise RuntimeError(f"{target.problem.key()}: {total.message}")
            self._floors[target] = total / self._bandwidth[device] * 1e-3
        return self._floors[target]

    @property
    def restarts(self) -> int:
        """Workers that were replaced."""
        return sum(p.restarts for p in (*self._timers, self._checkers, self._compiler.pool))

    @property
    def bandwidth_gbs(self) -> float | None:
        """Copy bandwidth measured in this run, the mean over the devices."""
        found = list(self._bandwidth.values())
        return sum(found) / len(found) if found else None

    def close(self) -> None:
        """See :class:`Evaluator`."""
        for pool in (self._compiler.pool, self._checkers, *self._timers):
            pool.close()


def _timed(result: Any) -> bool:
    return not isinstance(result, Failed) and isinstance(result[0], Timed)
