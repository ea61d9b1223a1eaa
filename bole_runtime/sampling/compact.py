"""Moving what belongs to the accepted path to the front of a request's rows."""

from __future__ import annotations

import torch

from bole_runtime.sampling.result import Acceptance


def compact_(buffer: torch.Tensor, result: Acceptance) -> torch.Tensor:
    """Move the rows of the accepted nodes to where a chain of them would be, in place, on the device.

    Row ``result.source[b, j]`` goes to row ``result.target[b, j]``; all other rows keep what they have. Fixed shapes
    and no host sync. It copies the whole buffer once: for a large cache, pass the pairs (where ``source >= 0``) to the
    engine's own move instead.

    Args:
        buffer: any dtype [rows, ...], the flat rows of the tree (``max_batch * max_nodes``, or packed ``max_total``).
        result: of :func:`accept`.

    Returns:
        ``buffer``.

    Raises:
        TypeError: wrong types.
        ValueError: another device; or, on the CPU, fewer rows than the tree has.
    """
    if not isinstance(buffer, torch.Tensor) or not isinstance(result, Acceptance):
        raise TypeError(
            f"buffer, result: expected a torch.Tensor and an Acceptance, got {type(buffer).__name__} and "
            f"{type(result).__name__}"
        )
    if buffer.dim() == 0:
        raise ValueError("buffer: expected [rows, ...], got a scalar")
    if buffer.device != result.source.device:
        raise ValueError(f"buffer: on {buffer.device}, but the result is on {result.source.device}")
    rows = buffer.shape[0]
    origin = torch.arange(rows + 1, device=buffer.device)
    source, target = result.source.flatten(), result.target.flatten()
    if buffer.device.type == "cpu" and source.numel() and int(source.max()) >= rows:
        raise ValueError(f"buffer: {rows} rows, but the accepted paths go up to row {int(source.max())}")
    # Entries that move nothing land in one extra place.
    used = (source >= 0) & (source < rows) & (target < rows)
    origin.scatter_(0, torch.where(used, target, rows), torch.where(used, source, 0))
    return buffer.copy_(buffer[origin[:rows]])
