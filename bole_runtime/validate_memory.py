"""Checks of memory: what a call writes overlaps neither itself nor anything else that the call uses.

Plain integers of host metadata. Views side by side in one buffer (q, k and v of one projection, the layers of one pool)
have ranges that overlap and no byte in common, so ranges only tell where to look closer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

import torch

from bole_runtime.tree.check import check_dense
from bole_runtime.validate import not_a

#: Range (first byte, past the last one, whether it is written), place in the list it came from, name, tensor.
_Span = tuple[tuple[int, int, bool], int, str, torch.Tensor]
_RANGE = itemgetter(0)


def extent(t: torch.Tensor) -> int:
    """Return the bytes from the first to past the last element."""
    if t.is_contiguous():
        return t.nbytes
    if t.numel() == 0:
        return 0
    return (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()


def check_elements_apart(name: str, t: torch.Tensor) -> None:
    """Refuse a tensor to write to whose elements share memory.

    Raises:
        ValueError: two elements have one address, or dimensions are interleaved in a way no slicing makes.
    """
    if t.is_contiguous() or t.numel() == 0:
        return
    inner = 1
    dims = [(s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1]
    for stride, size in sorted(dims):
        if stride < inner:
            how = "expanded (stride 0)" if stride == 0 else "overlaps itself"
            raise ValueError(
                f"{name}: {how}, so elements share memory; got shape {tuple(t.shape)} with strides {t.stride()}"
            )
        inner += (size - 1) * stride


def apart(written: Iterable[torch.Tensor], read: Iterable[torch.Tensor]) -> bool:
    """Whether tensors to write to are contiguous and of ranges to themselves: the quick test for the usual case.

    It knows no names: they take longer to format than the test does, and only :func:`check_apart` needs them.
    """
    spans: list[tuple[int, int]] = []
    for t in written:
        if not t.is_contiguous():
            return False
        at = t.data_ptr()
        size = t.nbytes
        if size:
            spans.append((at, at + size))
    if not spans:
        return True
    spans.sort()
    ends: list[int] = []
    end = 0
    for low, high in spans:
        if low < end:
            return False
        end = high
        ends.append(high)
    first = spans[0][0]
    for t in read:
        at = t.data_ptr()
        if at < end:
            past = at + (t.nbytes if t.is_contiguous() else extent(t))
            # The first range that ends behind where this one begins.
            if past > first and past > at and spans[bisect_right(ends, at)][0] < past:
                return False
    return True


def refuse_overlaps(
    written: Sequence[torch.Tensor],
    read: Sequence[torch.Tensor],
    names: Callable[[], tuple[Iterable[str], Iterable[str]]],
) -> None:
    """Refuse tensors to write to that share memory with one another or with what is read.

    Args:
        written: tensors.
        read: tensors.
        names: called when the quick test fails: the names of both, in order.

    Raises:
        ValueError: an overlap.
    """
    if not written or apart(written, read):
        return
    of_written, of_read = names()
    check_apart(list(zip(of_written, written, strict=True)), list(zip(of_read, read, strict=True)))


def check_apart(written: Sequence[tuple[str, torch.Tensor]], read: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse tensors to write to that share memory: elements of one, two of them, or one and what is read.

    Raises:
        ValueError: an overlap.
    """
    for name, t in written:
        check_elements_apart(name, t)
    if written[0][1].is_meta:
        return  # no memory, and addresses that mean nothing
    spans: list[_Span] = []
    low, high = 1 << 64, 0
    for name, t in written:
        at = t.data_ptr()
        end = at + extent(t)
        if end > at:
            spans.append(((at, end, True), len(spans), name, t))
            low, high = min(low, at), max(high, end)
    for name, t in read:
        at = t.data_ptr()
        if at < high and low < at + extent(t) > at:
            spans.append(((at, at + extent(t), False), len(spans), name, t))
    spans.sort(key=_RANGE)
    if not _clash(s[0] for s in spans):
        return
    for group in _touching(spans):
        if _clash(s[0] for s in group) and not _side_by_side(group):
            _name_overlap(group)


def _clash(ranges: Iterable[tuple[int, int, bool]]) -> bool:
    """Whether a range that is written overlaps another, of ranges in ascending order."""
    end = end_written = -1
    for low, high, written in ranges:
        if low < end_written or (written and low < end):
            return True
        end = max(end, high)
        if written:
            end_written = max(end_written, high)
    return False


def _touching(spans: list[_Span]) -> list[list[_Span]]:
    """Split ranges in ascending order where no range goes on."""
    groups: list[list[_Span]] = []
    end = -1
    for span in spans:
        if span[0][0] >= end:
            groups.append([])
        groups[-1].append(span)
        end = max(end, span[0][1])
    return groups


def _side_by_side(spans: list[_Span]) -> bool:
    """Whether ranges repeat with one period, and have parts of the period to themselves: a proof that none overlap."""
    (base, _, _), _, _, first = spans[0]
    size = first.element_size()
    periods = {s * size for n, s in zip(first.shape, first.stride(), strict=True) if n > 1 and s > 0}
    for period in sorted(periods, reverse=True):
        parts: list[tuple[int, int, bool]] = []
        for (low, _, written), _, _, t in spans:
            item = t.element_size()
            inner = item + sum(
                (n - 1) * s * item for n, s in zip(t.shape, t.stride(), strict=True) if s * item % period
            )
            at = (low - base) % period
            if at + inner > period:
                break
            parts.append((at, at + inner, written))
        else:
            parts.sort()
            if not _clash(parts):
                return True
    return False


def _name_overlap(spans: list[_Span]) -> None:
    spans = sorted(spans, key=itemgetter(1))
    for n, a in enumerate(spans):
        for b in spans[n + 1 :]:
            pair = sorted((a, b), key=_RANGE)
            if _clash(s[0] for s in pair) and not _side_by_side(pair):
                raise ValueError(f"{a[2]}: overlaps {b[2]} in memory; what is written needs memory of its own")


def check_workspace(workspace: object, device: torch.device) -> None:
    """Check scratch memory given by the caller: one run of bytes that kernels can use as fp32, whatever its dtype.

    How much a call needs is known where its kernels are chosen.

    Raises:
        TypeError: not a dense tensor.
        ValueError: on another device, not contiguous, or bytes that are no whole, aligned fp32 elements.
    """
    if not isinstance(workspace, torch.Tensor):
        not_a("workspace", workspace, "a torch.Tensor or None")
    check_dense("workspace", workspace)
    if workspace.device != device:
        raise ValueError(f"workspace: on {workspace.device}, but the tree is on {device}")
    if not workspace.is_contiguous():
        raise ValueError(
            "workspace: must be contiguous, since kernels write to all of its bytes and to no other; got shape "
            f"{tuple(workspace.shape)} with strides {workspace.stride()}"
        )
    item = workspace.element_size()
    if item < 4:
        size, offset = workspace.numel() * item, workspace.storage_offset() * item
        if size % 4 or offset % 4:
            raise ValueError(
                f"workspace: {size} bytes at byte {offset} of a storage of {workspace.dtype} are no fp32 elements; "
                "size and offset must be multiples of 4 bytes"
            )
    if workspace.data_ptr() % 4:
        raise ValueError(f"workspace: address {workspace.data_ptr():#x} is not aligned to 4 bytes")
