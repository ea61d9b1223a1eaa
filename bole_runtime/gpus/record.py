"""The record of one GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bole_runtime.kernels.space import GpuLimits


@dataclass(frozen=True)
class GpuRecord:
    """Facts about one GPU product. Rates and bandwidth are the vendor's nominal, dense figures.

    Attributes:
        key: short name, which is also the folder of its tables (``h200``).
        title: the product's name, for people.
        vendor: ``nvidia`` or ``amd``.
        architecture: ``ampere``, ``ada``, ``hopper``, ``blackwell``, ``cdna3``.
        status: ``supported``, or ``unsupported`` for a named gap.
        device_names: the exact names torch reports for this product.
        aliases: other words a user may give for it (``h100-sxm``); see :func:`bole_runtime.gpus.get`.
        tables_from: keys of same-architecture GPUs whose tables stand in while this one has none, nearest first.
        compute_capability: CUDA compute capability; None for a GPU that has none.
        sms: streaming multiprocessors (compute units on AMD).
        smem_per_block: shared memory one thread block may opt in to, bytes.
        registers_per_sm: 32-bit registers of one multiprocessor.
        l2_bytes: size of the L2 cache.
        memory_gib: nominal device memory. Vendors write GB; torch reports up to a tenth less, in GiB.
        bandwidth_gbs: nominal memory bandwidth, GB/s (10^9 bytes).
        bf16_tflops: dense bf16 tensor-core rate with fp32 accumulation, TFLOP/s.
        tf32_tflops: dense tf32 rate, TFLOP/s.
        reason: why an unsupported GPU is not supported; empty otherwise.
        note: what a reader of the figures should know; may be empty.
    """

    key: str
    title: str
    vendor: str
    architecture: str
    status: str
    device_names: tuple[str, ...]
    aliases: tuple[str, ...]
    tables_from: tuple[str, ...]
    compute_capability: tuple[int, int] | None
    sms: int
    smem_per_block: int
    registers_per_sm: int
    l2_bytes: int
    memory_gib: int
    bandwidth_gbs: float
    bf16_tflops: float
    tf32_tflops: float
    reason: str = ""
    note: str = ""

    @property
    def supported(self) -> bool:
        """Whether kernels are generated for this GPU."""
        return self.status == "supported"

    def limits(self) -> GpuLimits:
        """Return what decides whether a configuration can exist on this GPU.

        Raises:
            ValueError: the GPU is a named gap, see ``reason``.
        """
        from bole_runtime.kernels.space import GpuLimits

        if not self.supported or self.compute_capability is None:
            raise ValueError(f"{self.title} is not supported: {self.reason}")
        return GpuLimits(
            compute_capability=self.compute_capability,
            sms=self.sms,
            smem_per_block=self.smem_per_block,
            l2_bytes=self.l2_bytes,
            bandwidth_gbs=self.bandwidth_gbs,
        )
