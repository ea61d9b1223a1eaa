"""Evaluation without the GPU: compile for it, rank by the roofline model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Literal

from bole_codegen.search import roofline
from bole_codegen.search.compiler import Compiler, Render, spilled
from bole_codegen.search.ledger import Ledger
from bole_codegen.search.results import Failed, KernelResources, Measurement, Screened, Screening, Timed
from bole_codegen.search.targets import Target, class_of
from bole_runtime.gpus import GpuRecord
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config, Variant


class OfflineEvaluator:
    """Compiles for the named GPU and ranks by the roofline model.

    Args:
        record: the GPU.
        variant_of: (op, name) -> declared variant.
        render: problem and configuration to kernels.
        workers: compiling processes; default, one a core.
        log: file for what compilers print.
        factory: bench class, for tests.
    """

    label: Literal["measured", "predicted"] = "predicted"
    devices = 1

    def __init__(
        self,
        record: GpuRecord,
        variant_of: Callable[[str, str], Variant],
        render: Render,
        workers: int | None = None,
        log: str | None = None,
        factory: str = "bole_codegen.search.compile_bench:CompileBench",
    ) -> None:
        self.ledger = Ledger()
        self.workers = workers or max(1, os.cpu_count() or 2)
        self.ledger.workers = {"compile": self.workers}
        self._record = record
        self._variant_of = variant_of
        self._compiler = Compiler(record.key, render, self.workers, log, self.ledger, factory)
        self._resources: dict[tuple[Specialisation, Config], tuple[KernelResources, ...]] = {}

    def start(self) -> None:
        """See :class:`bole_codegen.search.evaluators.Evaluator`."""
        self._compiler.pool.start()

    async def screen(self, problem: Specialisation, config: Config, keep: bool = False) -> Screening:
        """See :class:`bole_codegen.search.evaluators.Evaluator`."""
        compiled = await self._compiled(problem, config)
        if isinstance(compiled, Failed):
            return compiled
        failed = None if keep else spilled(compiled, self._variant_of(problem.op, config.variant).spills)
        return failed or Screened(None, compiled)

    async def confirm(self, problem: Specialisation, config: Config) -> Screening:
        """See :class:`bole_codegen.search.evaluators.Evaluator`. Nothing can be checked without the GPU.

        What an earlier run screened is compiled here, with all other finalists, rather than one by one in ``finals``.
        """
        compiled = await self._compiled(problem, config)
        return compiled if isinstance(compiled, Failed) else Screened(None, compiled)

    async def quick(self, target: Target, config: Config, device: int) -> Measurement:
        """See :class:`bole_codegen.search.evaluators.Evaluator`. Compiles what an earlier run screened, as it did."""
        del device
        resources = await self._compiled(class_of(target.problem), config)
        if isinstance(resources, Failed):
            return resources
        variant = self._variant_of(target.problem.op, config.variant)
        return Timed(roofline.predict_us(target, config, variant, self._record, resources), 0.0)

    async def finals(self, target: Target, configs: Sequence[Config], device: int) -> dict[Config, Measurement]:
        """See :class:`bole_codegen.search.evaluators.Evaluator`."""
        return {config: await self.quick(target, config, device) for config in configs}

    async def _compiled(self, problem: Specialisation, config: Config) -> tuple[KernelResources, ...] | Failed:
        """Return what the kernels of a candidate take, compiling them where this run has not."""
        known = self._resources.get((problem, config))
        if known is not None:
            return known
        compiled = await self._compiler.candidate(problem, config)
        if not isinstance(compiled, Failed):
            self._resources[problem, config] = compiled
        return compiled

    async def floor_us(self, target: Target, device: int) -> float:
        """See :class:`bole_codegen.search.evaluators.Evaluator`. At the nominal bandwidth."""
        del device
        return roofline.floor_us(target, self._record)

    @property
    def restarts(self) -> int:
        """Workers that were replaced."""
        return self._compiler.pool.restarts

    @property
    def bandwidth_gbs(self) -> float | None:
        """The nominal bandwidth."""
        return self._record.bandwidth_gbs

    def close(self) -> None:
        """See :class:`bole_codegen.search.evaluators.Evaluator`."""
        self._compiler.pool.close()
