"""Searches on a simulated device: real variants and kernels' text, times from a surface, a clock that jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bole_codegen.render import render
from bole_codegen.search.driver import Driver
from bole_codegen.search.environment import Environment
from bole_codegen.search.finish import Hints, Incumbents
from bole_codegen.search.journal import open_storage
from bole_codegen.search.kinds import SEARCHED_OPS
from bole_codegen.search.outcome import Options, RunResult
from bole_codegen.search.progress import Progress
from bole_codegen.search.simulate import JumpingLoop, SimulatedEvaluator, Surface
from bole_codegen.search.store import Store
from bole_codegen.search.targets import Geometry, Target, make_targets
from bole_runtime import gpus
from bole_runtime.kernels.default import default_config
from bole_runtime.kernels.space import Config, Variant
from bole_runtime.kernels.variants import all_variants, get_variant

RECORD = gpus.get("h200")


def targets(**changes: Any) -> tuple[Target, ...]:
    options: dict[str, Any] = {
        "ops": ["commit"],
        "families": ["gdn"],
        "in_dtypes": ["bf16"],
        "state_dtypes": ["fp32"],
        "gate_modes": ["raw"],
        "precisions": ["fast"],
        "nodes": [16],
        "batches": [8],
        "pendings": [0],
    }
    return make_targets([Geometry(16, 32, 128, 128)], **{**options, **changes})


def few(*names: str) -> Callable[[str], Sequence[Variant]]:
    """Return a look-up of some variants only, so that a space can be tried in full."""
    return lambda op: [v for v in all_variants(op) if not names or v.name in names]


class Simulation:
    """One search.

    Args:
        storage: journal file or database URL.
        surface: true times and faults.
        variants: op -> variants.
        workers: compiling processes.
        devices: timing devices.
        factor: seconds of a real loop to a simulated second; None jumps.
        faulty_defaults: whether the surface's faults hit the analytic defaults too.
        incumbents: what tables hold.
        options: of the driver.
    """

    def __init__(
        self,
        storage: str | Path,
        surface: Surface | None = None,
        *,
        variants: Callable[[str], Sequence[Variant]] = all_variants,
        workers: int = 14,
        devices: int = 1,
        factor: float | None = None,
        faulty_defaults: bool = False,
        incumbents: Incumbents = lambda target: Hints(),
        **options: Any,
    ) -> None:
        declared = {(op, v.name): v for op in SEARCHED_OPS for v in variants(op)}
        store = Store(open_storage(str(storage)), "h200", "0", declared)

        def default(problem: Any, limits: Any) -> Config:
            found = default_config(problem, limits)
            allowed = variants(problem.op)
            return found if found.variant in {v.name for v in allowed} else allowed[0].default(problem, limits)

        self.env = Environment(RECORD, RECORD.limits(), variants, default, render, store, 0)
        self._factor = factor

        def good(config: Config) -> bool:
            return not faulty_defaults and config in self._defaults

        self._defaults: set[Config] = set()
        self.evaluator = SimulatedEvaluator(
            RECORD,
            get_variant,
            render,
            surface or Surface(),
            workers=workers,
            devices=devices,
            good=good,
            factor=1.0 if factor is None else factor,
        )
        self.saved: list[Any] = []
        self.driver = Driver(self.env, self.evaluator, Options(**options), incumbents, self.saved.extend, Progress())

    def run(self, chosen: Sequence[Target]) -> RunResult:
        """Search; return the result."""
        self._defaults.update(self.env.default(t.problem, self.env.limits) for t in chosen)
        if self._factor is not None:
            return self.driver.run(chosen)
        loop = JumpingLoop()
        try:
            return self.driver.run(chosen, loop)
        finally:
            _close(loop)

    def table(self) -> dict[str, tuple[str, tuple[tuple[str, Any], ...]]]:
        """Return what was chosen, by key."""
        return {e.key(): (e.variant, tuple(sorted(e.params.items()))) for e in self.saved}

    def true(self, target: Target) -> float:
        """Return the surface's time of what was chosen in a bucket."""
        entry = next(e for e in self.saved if e.problem() == target.problem)
        return self.evaluator.true_us(target, get_variant(entry.op, entry.variant).config(entry.params))


def jumping(work: Callable[[asyncio.AbstractEventLoop], Any]) -> Any:
    """Call with a loop whose clock jumps."""
    loop = JumpingLoop()
    try:
        return work(loop)
    finally:
        _close(loop)


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Close a loop, and end what still compiles for a run that was ended."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left))
    loop.close()
