"""A search without a device: a deterministic cost surface, latencies, planted faults, a clock that jumps.

It stands behind the same interface as the real evaluators, so that what the search does, what it costs and what it
survives can be tested in seconds. Nothing here is ever written to a table that ships: no time is a measurement.
"""

from __future__ import annotations

import asyncio
import hashlib
import selectors
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from bole_codegen.search import roofline
from bole_codegen.search.compiler import COMPILE_LIMIT, Render, spilled
from bole_codegen.search.evaluators import CHECK_LIMIT, CHECKERS
from bole_codegen.search.kinds import kind_of
from bole_codegen.search.ledger import Ledger, now
from bole_codegen.search.results import Failed, KernelResources, Measurement, Screened, Screening, Timed
from bole_codegen.search.targets import Target
from bole_runtime.gpus import GpuRecord
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config, Variant


def unit(*parts: object) -> float:
    """Return a number in [0, 1) that follows from its arguments alone."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


@dataclass(frozen=True)
class Surface:
    """True times, compile times and faults.

    Attributes:
        seed: another seed is another GPU.
        single: how far a parameter's value moves the time off the roofline model's, as a fraction.
        pair: the same for every pair of parameters.
        noise: relative noise of one measurement.
        day: another day has other noise on the same times.
        faulty: kind of failure to the share of configurations that fail so; ``late`` kinds pass the first check and
            fail the full one.
        compile_s: fewest and most seconds a kernel compiles.
    """

    seed: int = 0
    single: float = 0.15
    pair: float = 0.03
    noise: float = 0.002
    day: int = 0
    faulty: Mapping[str, float] = field(default_factory=dict)
    compile_s: tuple[float, float] = (1.0, 8.0)

    def true_us(self, target: Target, config: Config, variant: Variant, record: GpuRecord) -> float:
        """Return the time that a perfect measurement would give."""
        us = roofline.predict_us(target, config, variant, record)
        spread = [(n, v) for n, v in config.params]
        for name, value in spread:
            us *= 1.0 + self.single * (2.0 * unit(self.seed, config.variant, name, value) - 1.0)
        for a, b in combinations(spread, 2):
            us *= 1.0 + self.pair * (2.0 * unit(self.seed, config.variant, a, b) - 1.0)
        return us

    def fault(self, problem: Specialisation, config: Config) -> str | None:
        """Return how a configuration fails, None for a good one."""
        place, low = unit(self.seed, "fault", problem.key(), str(config)), 0.0
        for kind, share in self.faulty.items():
            low += share
            if place < low:
                return kind
        return None


@dataclass(frozen=True)
class Latencies:
    """Seconds of what is not compiling."""

    check: float = 0.08
    draw: float = 0.4
    quick: float = 0.07
    finals: float = 0.6
    restart: float = 6.0


#: What a kind shows itself in, unless it is compiling.
_AT_COMPILE = ("compile", "slow", "resources", "spills")


class SimulatedEvaluator:
    """An evaluator whose times come from a surface, and whose waiting takes no time in a :class:`JumpingLoop`.

    Args:
        record: the GPU.
        variant_of: (op, name) -> declared variant.
        render: problem and configuration to kernels.
        surface: what is true.
        latencies: what it takes to find out.
        workers: compiling processes.
        devices: timing devices.
        good: configurations without a fault whatever the surface says: the default has been looked at by people.
        factor: seconds of the loop to one simulated second; small for a real loop in a test.
    """

    label: Literal["measured", "predicted"] = "measured"
    bandwidth_gbs: float | None

    def __init__(
        self,
        record: GpuRecord,
        variant_of: Callable[[str, str], Variant],
        render: Render,
        surface: Surface,
        latencies: Latencies | None = None,
        workers: int = 14,
        devices: int = 1,
        good: Callable[[Config], bool] = lambda config: False,
        factor: float = 1.0,
    ) -> None:
        self.ledger = Ledger()
        self.workers = workers
        self.devices = devices
        self.ledger.workers = {"compile": workers, "check": CHECKERS * devices, "time": devices}
        self.bandwidth_gbs = record.bandwidth_gbs
        self.evaluations = 0
        self.restarts = 0
        self._record = record
        self._variant_of = variant_of
        self._render = render
        self._surface = surface
        self._latency = latencies or Latencies()
        self._good = good
        self._factor = factor
        self._drawn: set[Target] = set()
        self._compiled: dict[tuple[str, bool], asyncio.Task[None]] = {}
        self._measured: dict[tuple[Target, Config, float], int] = {}

    def start(self) -> None:
        """Nothing to start; processes of the loop that runs now."""
        self._compiled = {}
        self._compilers = asyncio.Semaphore(self.workers)
        self._checkers = asyncio.Semaphore(CHECKERS * self.devices)
        self._timers = [asyncio.Semaphore(1) for _ in range(self.devices)]

    async def screen(self, problem: Specialisation, config: Config, keep: bool = False) -> Screening:
        """See :class:`bole_codegen.search.evaluators.Evaluator`."""
        self.evaluations += 1
        fault = None if self._good(config) else self._surface.fault(problem, config)
        await self._compile(problem, config, COMPILE_LIMIT if fault == "slow" else None)
        if fault == "spills":
            failed = spilled([KernelResources(0, 255, 4000)], self._variant_of(problem.op, config.variant).spills)
            if failed is not None and not keep:
                return failed
        elif fault in _AT_COMPILE:
            return Failed(fault, "planted")
        elif fault is not None and not fault.startswith("late "):
            await self._use(self._checkers, "check", CHECK_LIMIT if fault == "hang" else self._latency.check)
            if fault in ("hang", "crash", "illegal", "killed", "bounds"):
                self.restarts += 1
                await self._use(self._checkers, "start", self._latency.restart)
            return Failed(fault, "planted")
        await self._use(self._checkers, "check", self._latency.check)
        return Screened(1e-6)

    async def confirm(self, problem: Specialisation, config: Config) -> Screening:
        """See :class:`bole_codegen.search.evaluators.Evaluator`."""
        if kind_of(problem).widens(problem):
            await self._compile(problem, config, None, wide=True)
        await self._use(self._checkers, "check", self._latency.check)
        fault = None if self._good(config) else self._surface.fault(problem, config)
        if fault is not None and fault.startswith("late "):
            return Failed(fault.removeprefix("late "), "planted")
        return Screened(1e-6)

    async def quick(self, target: Target, config: Config, device: int) -> Measurement:
        """See :class:`bole_codegen.search.evaluators.Evaluator`."""
        await self._draw(target, device)
        await self._use(self._timers[device], "time", self._latency.quick)
        return self._measure(target, config, 2.0)

    async def finals(self, target: Target, configs: Sequence[Config], device: int) -> dict[Config, Measurement]:
        """See :class:`bole_codegen.search.evaluators.Evaluator`."""
        await self._draw(target, device)
        await self._use(self._timers[device], "finals", self._latency.finals)
        return {c: self._measure(target, c, 1.0) for c in configs}

    async def floor_us(self, target: Target, device: int) -> float:
        """See :class:`bole_codegen.search.evaluators.Evaluator`."""
        del device
        return roofline.floor_us(target, self._record)

    def close(self) -> None:
        """Nothing to release."""

    def true_us(self, target: Target, config: Config) -> float:
        """Return the surface's time."""
        variant = self._variant_of(target.problem.op, config.variant)
        return self._surface.true_us(target, config, variant, self._record)

    def _measure(self, target: Target, config: Config, scale: float) -> Timed:
        # Counted apart: a comparison of finalists gives the same whether their quick times were measured or read.
        count = self._measured[target, config, scale] = self._measured.get((target, config, scale), 0) + 1
        off = (
            self._surface.noise
            * scale
            * (2.0 * unit(self._surface.seed, self._surface.day, target.problem.key(), config, scale, count) - 1.0)
        )
        us = self.true_us(target, config)
        return Timed(us * (1.0 + off), us * self._surface.noise, 3)

    async def _draw(self, target: Target, device: int) -> None:
        key = kind_of(target.problem).shared(target)
        if key not in self._drawn:
            self._drawn.add(key)
            await self._use(self._timers[device], "draw", self._latency.draw)

    async def _compile(
        self, problem: Specialisation, config: Config, seconds: float | None, wide: bool = False
    ) -> None:
        waiting = []
        for kernel in self._render(problem, config):
            key = (kernel.name, wide)
            low, high = self._surface.compile_s
            takes = (
                low + (high - low) * unit(self._surface.seed, "compile", kernel.name) if seconds is None else seconds
            )
            if key not in self._compiled:
                self._compiled[key] = asyncio.ensure_future(self._use(self._compilers, "compile", takes))
            waiting.append(asyncio.shield(self._compiled[key]))
        await asyncio.gather(*waiting)

    async def _use(self, of: asyncio.Semaphore, phase: str, seconds: float) -> None:
        async with of:
            begun = now()
            self.ledger.enter(phase)
            try:
                await asyncio.sleep(seconds * self._factor)
            finally:
                self.ledger.leave(phase, now() - begun)


class _Jump(selectors.SelectSelector):
    """Instead of waiting, moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready now; else let the time pass at once."""
        ready = super().select(0)
        if not ready and timeout is not None and timeout > 0:
            self.clock += timeout
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop in which sleeping takes no time. Close it after use."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Return the simulated seconds."""
        return self._jump.clock
