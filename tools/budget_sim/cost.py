"""An analytic model of a forward on an H200-like GPU. Nobody measured these times: the table is labelled a model."""

from __future__ import annotations

from dataclasses import dataclass

from bole_runtime.budget import CalibrationTable
from bole_runtime.budget.table import Timing


@dataclass(frozen=True)
class Machine:
    """What the model knows. Defaults: an H200 and a hybrid model of Qwen3.5-9B's size in bf16.

    Attributes:
        bandwidth: bytes a microsecond that reading achieves.
        flops: operations a microsecond that bf16 matrix products achieve.
        weights: bytes of the weights, read once a step.
        operations: operations a token.
        state: bytes of recurrent state a request, read once a step and written once.
        kv: bytes of KV cache a token of context.
        fixed_us: launches, sampling and the rest of a step.
    """

    bandwidth: float = 3.9e6
    flops: float = 6.0e8
    weights: float = 18e9
    operations: float = 18e9
    state: float = 24 * 2 * 2**20
    kv: float = 8 * 4 * 256 * 2 * 2.0
    fixed_us: float = 300.0

    def step_us(self, batch: int, nodes: int, kv: int) -> float:
        """Return the time of one step."""
        reading = self.weights / self.bandwidth
        products = batch * nodes * self.operations / self.flops
        # The two overlap, but not perfectly near the knee.
        dense = (reading**4 + products**4) ** 0.25
        caches = batch * (2 * self.state + kv * self.kv) / self.bandwidth
        return self.fixed_us + dense + caches


def model_table(
    batches: list[int], nodes: list[int], kv: int, depth: int, machine: Machine | None = None
) -> CalibrationTable:
    """Return the model as a calibration table."""
    machine = machine or Machine()
    entries = [
        Timing(
            batch=b, kv=kv, depth=min(depth, n - 1), nodes=n, median_us=machine.step_us(b, n, kv), spread_us=0.0,
            repeats=0,
        )
        for b in batches
        for n in sorted({1, *nodes})
    ]  # fmt: skip
    return CalibrationTable(
        entries, name="analytic model", device="H200-like model", date="2026-01-01", label="model",
        protocol=f"not measured: {machine}",
    )  # fmt: skip
