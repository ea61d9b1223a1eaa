"""A search without a GPU: known times, planted failures, a log of every call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pool_bench
import table_fakes as fakes

from bole_codegen.search.ledger import Ledger
from bole_codegen.search.results import CandidateError, Failed, KernelResources, Screened, Timed
from bole_codegen.search.targets import Geometry, Target, make_targets
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, KernelPlan


@dataclass(frozen=True)
class FakeKernel:
    """A rendered kernel: MODE leaves no trace in its text, so configurations that differ in it are duplicates."""

    name: str
    text_hash: str
    plan: KernelPlan


def render(problem: Problem, config: Config) -> tuple[FakeKernel, ...]:
    plan = fakes.FUSED.plans(problem, config)[0]
    name = f"x_{config['BV']}_{config['STAGES']}_{problem.nodes}"
    return (FakeKernel(name, f"{config['BV']:08x}{problem.nodes:08x}", plan),)


def true_us(target: Target, config: Config) -> float:
    """Fastest at BV = 64 for little work and 128 for much, STAGES = 2."""
    best = 64 if target.problem.work <= 256 else 128
    away = abs(config["BV"].bit_length() - best.bit_length())
    return 0.01 * target.problem.work + 5.0 + 2.0 * away + 1.5 * abs(config["STAGES"] - 2)


class FakeBench:
    """Answers from :func:`true_us`.

    ``plant`` maps ``method BV`` or ``method BV.STAGES`` to a way to fail, ``log`` collects calls. A kernel
    that is planted with ``compile BV.STAGES: spill`` does compile, and takes far too many registers.
    """

    def __init__(self, log: str, plant: dict[str, str] | None = None, delay: float = 0.0) -> None:
        self._log = log
        self._plant = plant or {}
        self._delay = delay

    def _note(self, what: str, config: Config) -> None:
        with open(self._log, "a") as file:
            file.write(f"{what} {config}\n")
        time.sleep(self._delay)
        place = f"{what} {config['BV']}"
        how = self._plant.get(f"{place}.{config['STAGES']}", self._plant.get(place))
        if how is not None:
            pool_bench.fail(how)

    def compile(self, problem: Problem, config: Config, index: int, wide: bool) -> KernelResources:
        if self._plant.get(f"compile {config['BV']}.{config['STAGES']}") == "spill":
            return KernelResources(1000, 255, 4000)
        self._note("wide" if wide else "compile", config)
        return KernelResources(1000, 100, 0)

    def gate(self, problem: Problem, config: Config) -> float:
        self._note("screen", config)
        return 1e-6

    def check(self, problem: Problem, config: Config) -> float:
        self._note("check", config)
        return 1e-6

    def quick(self, target: Target, config: Config) -> Timed:
        self._note("quick", config)
        return Timed(true_us(target, config) * 1.001, 0.01, 4)

    def finals(self, target: Target, configs: list[Config], replays: int) -> list[Timed | Failed]:
        for config in configs:
            self._note("finals", config)
        return [Timed(true_us(target, config), 0.01, 4) for config in configs]

    def bandwidth(self) -> float:
        return 4000.0

    def floor_bytes(self, target: Target) -> int:
        return 4_000_000


class CompileBench(FakeBench):
    """Ignores what a compiling process is told of the GPU."""

    def __init__(self, gpu: str = "", **options: Any) -> None:
        super().__init__(**options)


class LocalEvaluator:
    """An evaluator in this process, for what needs no isolation."""

    label = "measured"
    workers = 2
    devices = 1
    bandwidth_gbs = 4000.0

    def __init__(self, bench: FakeBench) -> None:
        self._bench = bench
        self.ledger = Ledger()

    def start(self) -> None:
        pass

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except CandidateError as error:
            return Failed(error.kind, error.message)
        except ValueError as error:
            return Failed("error", str(error))

    async def screen(self, problem: Problem, config: Config, keep: bool = False) -> Any:
        result = self._try(lambda: self._bench.gate(problem, config))
        return result if isinstance(result, Failed) else Screened(result)

    async def confirm(self, problem: Problem, config: Config) -> Any:
        result = self._try(lambda: self._bench.check(problem, config))
        return result if isinstance(result, Failed) else Screened(result)

    async def quick(self, target: Target, config: Config, device: int) -> Any:
        return self._try(lambda: self._bench.quick(target, config))

    async def finals(self, target: Target, configs: Any, device: int) -> dict[Config, Any]:
        found = {c: self._try(lambda c=c: self._bench.finals(target, [c], 1)) for c in configs}
        return {c: r if isinstance(r, Failed) else r[0] for c, r in found.items()}

    async def floor_us(self, target: Target, device: int) -> float:
        return 1.0

    def close(self) -> None:
        pass


def targets(batches: tuple[int, ...] = (1, 8, 64), nodes: tuple[int, ...] = (16,)) -> tuple[Target, ...]:
    return make_targets(
        [Geometry(16, 32, 128, 128)],
        ops=["verify"],
        families=["gdn"],
        in_dtypes=["bf16"],
        state_dtypes=["fp32"],
        gate_modes=["raw"],
        precisions=["fast"],
        nodes=nodes,
        batches=batches,
        pendings=[0],
    )


def make(
    folder: Path,
    *,
    plant: dict[str, str] | None = None,
    delay: float = 0.0,
    fresh: bool = False,
    isolated: bool = False,
    incumbents: Any = None,
    **options: Any,
) -> tuple[Any, list[Any]]:
    """Return a driver with fakes, and the list that its entries are saved to."""
    from bole_codegen.search.driver import Driver
    from bole_codegen.search.environment import Environment
    from bole_codegen.search.evaluators import MeasuredEvaluator
    from bole_codegen.search.finish import Hints
    from bole_codegen.search.journal import open_storage
    from bole_codegen.search.outcome import Options
    from bole_codegen.search.progress import Progress
    from bole_codegen.search.store import Store
    from bole_runtime import gpus

    record = gpus.get("h200")
    store = Store(open_storage(str(folder / "journal")), "h200", "0", {("verify", "fused"): fakes.FUSED}, fresh)
    env = Environment(record, fakes.LIMITS, fakes.variants, fakes._default, render, store, 0)
    bench = {"log": str(folder / "calls"), "plant": plant, "delay": delay}
    evaluator: Any = LocalEvaluator(FakeBench(**bench))
    if isolated:
        evaluator = MeasuredEvaluator(
            record, render, workers=1, factory="search_fakes:FakeBench", compiler="search_fakes:CompileBench"
        )
        for pool in (evaluator._checkers, evaluator._compiler.pool, *evaluator._timers):
            pool._options = [bench] * pool.size
    saved: list[Any] = []
    hints = incumbents or (lambda target: Hints())
    return Driver(env, evaluator, Options(**options), hints, saved.extend, Progress()), saved


def run(folder: Path, chosen: tuple[Target, ...], **options: Any) -> tuple[Any, list[Any]]:
    """Search with fakes; return the result and the entries in the order in which they were saved."""
    driver, saved = make(folder, **options)
    try:
        driver.run(chosen)
    finally:
        driver._evaluator.close()
    return driver.result, saved


def calls(folder: Path, what: str = "") -> list[str]:
    """Return the calls of benches so far that begin with ``what``."""
    path = folder / "calls"
    return [line for line in path.read_text().splitlines() if line.startswith(what)] if path.exists() else []
