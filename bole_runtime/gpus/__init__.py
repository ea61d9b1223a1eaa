"""GPU records: facts about the GPUs Bole knows, as data, and lookup by exact device name."""

from __future__ import annotations

from bole_runtime.gpus.devices import device_limits
from bole_runtime.gpus.lookup import UnknownGpuError, all_records, explain_device_name, get, identify, table_keys
from bole_runtime.gpus.record import GpuRecord

__all__ = [
    "GpuRecord",
    "UnknownGpuError",
    "all_records",
    "device_limits",
    "explain_device_name",
    "get",
    "identify",
    "table_keys",
]
