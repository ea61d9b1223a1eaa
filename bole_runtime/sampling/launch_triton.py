"""How the device walk is cut: groups, blocks, programs of a request."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton


class Tuning(NamedTuple):
    """What may be chosen freely. Results do not depend on ``block``, ``stages`` and ``split``.

    Attributes:
        group: logits of a group, a power of two; more where a row has more than 8192 groups.
        filter_group: the same where there are filters, which look into whole groups.
        tile: logits that the filters look into before they search the whole row.
        block: bytes of a row that a program reads at once.
        stages: blocks in flight.
        warps: warps of a program.
        split: the most programs of a request, a power of two.
        per_sm: programs that share a multiprocessor, where there are neither filters nor rejection. Registers are
            limited so that they fit, and the last long walk of a batch still has many programs.
    """

    group: int = 256
    filter_group: int = 32
    tile: int = 4096
    block: int = 8192
    stages: int = 6
    warps: int = 8
    split: int = 8
    per_sm: int = 2


TUNING = Tuning()
_MOST_GROUPS = 8192
_REGISTERS = 65536


class Shape(NamedTuple):
    """The numbers that a kernel is compiled for, programs of a request, and registers of a thread (None: free)."""

    group: int
    groups: int
    list: int
    rows: int
    split: int
    stages: int
    warps: int
    registers: int | None


def _power(number: int) -> int:
    """Return the largest power of two that is not above ``number``, which is at least 1."""
    return 1 << (number.bit_length() - 1)


def multiprocessors(device: torch.device) -> int:
    """Return how many programs certainly run side by side, each alone on a multiprocessor; 0 if that is not known."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shape_of(size: int, batch: int, itemsize: int, sms: int, filters: bool, light: bool) -> Shape:
    """Return how a walk is cut.

    Args:
        size: vocabulary.
        batch: requests.
        itemsize: bytes of an element of the widest tensor that is read.
        sms: multiprocessors. The programs of a request wait for each other, so all of a launch have to fit.
        filters: whether top-k, top-p or min-p is given.
        light: whether a program is small enough to share a multiprocessor.
    """
    chosen = TUNING
    group = chosen.filter_group if filters else chosen.group
    while triton.cdiv(size, group) > _MOST_GROUPS:
        group *= 2
    count = triton.cdiv(size, group)
    groups = triton.next_power_of_2(count)
    rows = min(groups, max(1, _power(max(1, chosen.block // itemsize)) // group))
    warps = chosen.warps if size > 1024 else 1
    shared = chosen.per_sm if light else 1
    # A program with less than two blocks waits more than it reads.
    split = min(chosen.split, _power(max(1, shared * sms // batch)), _power(max(1, triton.cdiv(count, rows) // 2)))
    return Shape(
        group=group,
        groups=groups,
        list=min(groups, max(1, chosen.tile // group)),
        rows=rows,
        split=split,
        stages=chosen.stages,
        warps=warps,
        registers=min(255, _REGISTERS // (32 * warps * shared)) if split > 1 and shared > 1 else None,
    )
