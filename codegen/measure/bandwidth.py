"""Measured copy bandwidth, the ceiling that every memory floor is computed from."""

from __future__ import annotations

from functools import partial

import torch

from bole_codegen.measure.timing import time_launches


def copy_bandwidth(nbytes: int = 4 << 30, replays: int = 10, device: torch.device | str | int | None = None) -> float:
    """Measure a device-to-device copy and return 1e9 bytes a second, bytes read plus bytes written.

    Args:
        nbytes: size of the source. Lowered to an eighth of the free memory where that is less.
        replays: timed copies, median taken.
        device: CUDA device; the current one if None.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("measuring bandwidth needs a CUDA device and none is available")
    with torch.cuda.device(device):
        free, _ = torch.cuda.mem_get_info()
        count = min(nbytes, free // 8) // 4
        # Random bits: constant data can run faster than real data.
        source = torch.randint(-(1 << 31), (1 << 31) - 1, (count,), dtype=torch.int32, device="cuda")
        target = torch.empty_like(source)
        # A kernel, not copy_(): captured in a graph, that becomes a copy node, which ran at two thirds of the rate.
        timing = time_launches(lambda _: partial(torch.bitwise_not, source, out=target), layers=1, replays=replays)
    return 2 * 4 * count / timing.median_us * 1e-3
