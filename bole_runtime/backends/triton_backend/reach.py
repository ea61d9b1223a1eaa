"""How far kernels address within a request: rows and heads are counted in 32 bits, requests and slots in 64."""

from __future__ import annotations

import torch

#: Elements that a row or a head may lie from the first one.
REACH = 2**31 - 1


def check_reach(name: str, tensor: torch.Tensor, rows: int) -> None:
    """Check that no row of a request and no head lies beyond the reach of a 32-bit offset.

    Args:
        name: argument, for the message.
        tensor: [..., rows, heads, dim].
        rows: rows of one request, which a packed tensor does not tell.

    Raises:
        ValueError: one does.
    """
    stride, heads = tensor.stride(), tensor.shape[-2]
    for what, count, step in (("rows", rows, stride[-3]), ("heads", heads, stride[-2])):
        if (count - 1) * step > REACH:
            raise ValueError(
                f"{name}: {count} {what} at a stride of {step} elements reach beyond the {REACH} that the kernels "
                f"address within a request; give a copy ({name}.contiguous()), or set BOLE_BACKEND=torch"
            )
