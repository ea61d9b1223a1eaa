"""How many layers keep the recurrent states out of L2 between two visits."""

from __future__ import annotations

import math


def layers_for_cold_l2(
    state_bytes_per_layer: int,
    l2_bytes: int,
    minimum: int = 3,
    multiple: float = 3.25,
    memory_cap: int | None = None,
    bytes_per_layer: int | None = None,
) -> int:
    """Return a number of layers whose states together are well over three times the L2 cache.

    At B = 1 with a 2 MiB state and a 60 MB L2 that is more than 90 layers; at B = 64 three are enough.

    Args:
        state_bytes_per_layer: bytes of state that one layer reads.
        l2_bytes: L2 capacity.
        minimum: fewest layers to return, unless ``memory_cap`` is lower.
        multiple: total state over L2.
        memory_cap: bytes that all layers may take together, or None.
        bytes_per_layer: bytes of one layer with its inputs and outputs, for the cap; the state alone if None.

    Raises:
        ValueError: a size is not positive, or not even one layer fits under the cap.
    """
    if state_bytes_per_layer < 1 or l2_bytes < 0 or minimum < 1:
        raise ValueError(f"sizes must be positive, got state {state_bytes_per_layer}, L2 {l2_bytes}, minimum {minimum}")
    layers = max(minimum, math.ceil(multiple * l2_bytes / state_bytes_per_layer))
    if memory_cap is not None:
        fits = memory_cap // max(state_bytes_per_layer, bytes_per_layer or 0)
        if fits < 1:
            raise ValueError(f"one layer needs more than the memory cap of {memory_cap} bytes")
        layers = min(layers, fits)
    return layers


def is_cold(layers: int, state_bytes_per_layer: int, l2_bytes: int) -> bool:
    """Whether the total state is at least three times L2, the least that the protocol accepts."""
    return layers * state_bytes_per_layer >= 3 * l2_bytes
