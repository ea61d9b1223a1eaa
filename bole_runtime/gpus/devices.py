"""Limits of the device that is present, known or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bole_runtime.gpus.lookup import identify

if TYPE_CHECKING:
    from bole_runtime.kernels.space import GpuLimits

#: Bandwidth assumed for an unknown GPU whose driver does not report its memory clock, GB/s. It only ranks defaults.
ASSUMED_BANDWIDTH_GBS = 1000.0
#: Shared memory a block gets on every CUDA GPU without opting in, bytes.
SMEM_WITHOUT_OPT_IN = 48 * 1024


def device_limits(properties: Any) -> GpuLimits:
    """Return the limits of a CUDA device from ``torch.cuda.get_device_properties(device)``.

    What the driver reports is taken over the record, so that a MIG slice or an unknown product gets its real limits.
    The bandwidth is the record's nominal figure for an exact device name, else computed from the memory clock and bus
    width, else :data:`ASSUMED_BANDWIDTH_GBS`.
    """
    from bole_runtime.kernels.space import GpuLimits

    record = identify(str(properties.name))
    if record is not None:
        bandwidth = record.bandwidth_gbs
    else:
        clock_khz = float(getattr(properties, "memory_clock_rate", 0) or 0)
        bus_bits = float(getattr(properties, "memory_bus_width", 0) or 0)
        # Two transfers a clock; kHz * bits / 8 is kB/s.
        bandwidth = 2.0 * clock_khz * bus_bits / 8.0 / 1e6 or ASSUMED_BANDWIDTH_GBS
    smem = getattr(properties, "shared_memory_per_block_optin", None)
    if smem is None:  # older torch does not report it
        smem = record.smem_per_block if record is not None else SMEM_WITHOUT_OPT_IN
    return GpuLimits(
        compute_capability=(int(properties.major), int(properties.minor)),
        sms=int(properties.multi_processor_count),
        smem_per_block=int(smem),
        l2_bytes=int(properties.L2_cache_size),
        bandwidth_gbs=bandwidth,
    )
