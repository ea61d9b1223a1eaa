"""What every class of a run shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bole_codegen.search.space import Render
from bole_codegen.search.store import Store
from bole_runtime.gpus import GpuRecord
from bole_runtime.kernels.problem import Specialisation
from bole_runtime.kernels.space import Config, GpuLimits, Variant

if TYPE_CHECKING:
    from bole_codegen.tables.known_bad import KnownBad


@dataclass(frozen=True)
class Environment:
    """What every class of a run shares.

    Attributes:
        record: the GPU.
        limits: of the GPU.
        variants: op -> declared variants.
        default: the analytic default.
        render: problem and configuration to kernels.
        store: finished evaluations.
        seed: of samplers.
        known_bad: kernels that failed here before, None to try them again.
    """

    record: GpuRecord
    limits: GpuLimits
    variants: Callable[[str], Iterable[Variant]]
    default: Callable[[Specialisation, GpuLimits], Config]
    render: Render
    store: Store
    seed: int
    known_bad: KnownBad | None = None
