"""The two operations of the library: verify proposal trees, commit what was accepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from bole_runtime import validate as check
from bole_runtime import validate_buffers as buffers
from bole_runtime import validate_memory as memory
from bole_runtime import validate_values as values
from bole_runtime.backends import get_backend
from bole_runtime.calls import CommitCall, VerifyCall
from bole_runtime.capture import factors_of
from bole_runtime.factors import Factors, PendingChain
from bole_runtime.families import RecurrenceSpec, get_family
from bole_runtime.families.spec import DATA_DTYPES
from bole_runtime.tree import TreeBatch
from bole_runtime.tree.check import checks_values
from bole_runtime.validate_layers import check_layers

if TYPE_CHECKING:
    from bole_runtime.kernels.space import Config


def verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    gates: Mapping[str, torch.Tensor | float],
    state: torch.Tensor,
    slots: torch.Tensor,
    tree: TreeBatch,
    recurrence: str | RecurrenceSpec = "gdn",
    precision: str = "lossless",
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    factors: Factors | None = None,
    workspace: torch.Tensor | None = None,
    pending: PendingChain | None = None,
    scale: float | None = None,
    qk_l2norm: bool | None = None,
    variant: Config | None = None,
    validate: bool | None = None,
) -> tuple[torch.Tensor, Factors]:
    """Run every node of every proposal tree through one recurrent layer, in one parallel step.

    Nothing is written but ``out`` and ``factors``. No host sync on a device, so a CUDA graph can hold the call.

    Args:
        q: queries, [B, N, HK, dk] for a dense tree or [T, HK, dk] for a packed one, of the tree's capacity. bf16,
            fp16 or fp32 (fp64 on the torch and reference backends). Any outer strides, last dimension contiguous.
            Same for k and v.
        k: keys, the shape of q.
        v: values, [B, N, HV, dv] or [T, HV, dv]; HV is a multiple of HK, value head h reads key head h // (HV // HK).
        gates: what the family takes beside q, k and v, in one of its gate modes (``docs/families.md`` lists them). For
            ``gdn`` either ready, {"g", "beta"}, or raw, {"a", "b", "A_log", "dt_bias"} with optional float
            "beta_scale". Per node [B, N, HV] or [T, HV], or with a last dimension dk or dv for vectors; per head [HV];
            fp32, bf16, fp16 or fp64, never rounded below fp32 inside.
        state: pool of committed states, [slots, HV, dv, dk], dk contiguous; fp32, bf16 or fp16.
        slots: int32 or int64 [B], the pool row of each request; -1 marks a padding row: nothing is read, its output
            is zero. The same slot may serve several requests.
        tree: topology and capacities. Padding nodes have output zero; packed rows that no request owns are unspecified.
        recurrence: family name or spec.
        precision: ``lossless`` or ``fast``.
        out: where to write, the shape of v. It, ``factors`` and ``workspace`` must not overlap one another or an input.
            Default: a new tensor.
        out_dtype: dtype of the output; default, that of ``out`` or of v.
        factors: buffers from :meth:`Factors.allocate` to copy the inputs to. Default: the factors alias the inputs,
            which must then stay unchanged until the commit.
        workspace: scratch memory for kernels that need it, contiguous, of any dtype, whole fp32 elements; allocated
            if missing.
        pending: accepted tokens that are not in the state yet, at most 64 a slot; its gates are those that captured
            factors hold (``gdn``: ready ones in every gate mode).
        scale: factor of q; default from the family, dk ** -0.5.
        qk_l2norm: whether to l2-normalise q and k; default from the family.
        variant: pin a kernel configuration instead of looking one up.
        validate: check index values and the tree's status (a host sync on a device). Default: only for CPU tensors.

    Returns:
        The output, and the factors that :func:`commit` needs.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: a wrong shape, device, stride, name or value. Nothing has run.

    Example:
        >>> tree = TreeBatch.from_parents(torch.tensor([[-1, 0, 0, 1]]))
        >>> q = k = v = torch.randn(1, 4, 2, 16)
        >>> gates = {"g": -torch.rand(1, 4, 2), "beta": torch.rand(1, 4, 2)}
        >>> pool, slots = torch.zeros(3, 2, 16, 16), torch.tensor([1])
        >>> out, factors = verify(q, k, v, gates=gates, state=pool, slots=slots, tree=tree)
        >>> commit(pool, slots, factors, torch.tensor([3]))  # nodes 0, 1 and 3 were accepted
    """
    if not isinstance(tree, TreeBatch):
        check.not_a("tree", tree, "a TreeBatch")
    spec = recurrence if isinstance(recurrence, RecurrenceSpec) else get_family(recurrence)
    device = tree.device
    backend = get_backend(device, spec)
    heads, dv, dk = check.check_qkv(q, k, v, tree, backend.name)
    check.check_state("state", state, device, heads, dv, dk, backend.name)
    slots = check.check_index("slots", slots, device, tree.max_batch)
    mode = check.gate_mode_of(spec, gates)
    tensors, beta_scale, options = check.check_gates(
        spec, mode, gates, tree.lead, (k.shape[-2], heads), (dk, dv), device
    )
    if precision not in check.PRECISIONS:
        raise ValueError(f"precision: {precision!r} is not allowed; allowed: {', '.join(check.PRECISIONS)}")
    scale = spec.default_scale(dk) if scale is None else check.check_number("scale", scale)
    if qk_l2norm is None:
        qk_l2norm = spec.qk_l2norm
    elif not isinstance(qk_l2norm, bool):
        check.not_a("qk_l2norm", qk_l2norm, "a bool or None")
    if out_dtype is not None and out_dtype not in DATA_DTYPES:
        raise TypeError(f"out_dtype: {out_dtype!r} is not allowed; allowed: {', '.join(map(str, DATA_DTYPES))}")
    if pending is not None:
        buffers.check_pending(spec, mode, pending, k, v, state.shape[0])
    if factors is not None:
        buffers.check_capture(spec, mode, factors, k, v, tensors)
    if variant is not None:
        check.check_variant(variant, "verify")
    if out is not None:
        buffers.check_out(out, v, out_dtype)
    if workspace is not None:
        memory.check_workspace(workspace, device)
    if out is not None or factors is not None or workspace is not None:
        buffers.check_memory(out, factors, workspace, (q, k, v, state, slots), tensors, pending)
    if out is None:
        out = torch.empty((*tree.lead, heads, dv), dtype=out_dtype or v.dtype, device=device)
    if backend.name == "triton" and out.dtype is torch.float64:
        raise TypeError("out: dtype torch.float64 is served by the torch and reference backends only")
    if checks_values(validate, device):
        values.check_status(tree)
        values.check_slots(slots, state.shape[0])
        if pending is not None:
            values.check_pending_values(pending, slots)
    call = VerifyCall(
        spec, q, k, v, tensors, mode, beta_scale, state, slots, tree, precision, scale, qk_l2norm, out,
        pending, factors, workspace, variant, options,
    )  # fmt: skip
    if out.numel():
        backend.verify(call)
    return out, factors_of(call)


def commit(
    pool: torch.Tensor | Sequence[torch.Tensor],
    slots: torch.Tensor,
    factors: Factors | Sequence[Factors],
    accepted: torch.Tensor,
    *,
    precision: str = "lossless",
    variant: Config | None = None,
    validate: bool | None = None,
) -> None:
    """Advance the committed states along the accepted paths, in place.

    Each row's pending chain (if the factors have one) and then the path from its root to ``accepted`` are applied to
    the state. The caller then resets ``pending.length``. No host sync on a device.

    Args:
        pool: [slots, HV, dv, dk], the pool that was verified against; or one pool a layer, each with memory of its own.
        slots: int32 or int64 [B]; -1 marks a padding row. A live slot may occur once.
        factors: of the verification; or one a layer, all of the same tree and family.
        accepted: int32 or int64 [B], request-local index of the terminal node. -1: nothing happens to the row, its
            pending chain included; its state stays bit-identical.
        precision: ``lossless`` or ``fast``.
        variant: pin a kernel configuration instead of looking one up.
        validate: check index values (a host sync on a device). Default: only for CPU tensors. Without it, a row whose
            accepted node is no live node is left alone, and duplicated slots are undefined.

    Raises:
        TypeError: an argument has a wrong type or dtype.
        ValueError: a wrong shape, device, stride or value. Nothing has been written.
    """
    checked_commit(pool, slots, factors, accepted, precision=precision, variant=variant, validate=validate)()


def checked_commit(
    pool: torch.Tensor | Sequence[torch.Tensor],
    slots: torch.Tensor,
    factors: Factors | Sequence[Factors],
    accepted: torch.Tensor,
    *,
    precision: str = "lossless",
    variant: Config | None = None,
    validate: bool | None = None,
) -> Callable[[], None]:
    """Check the arguments of :func:`commit` and return what does it, for callers with more than one thing to write."""
    pools = (pool,) if isinstance(pool, torch.Tensor) else check.as_tuple("pool", pool, "a torch.Tensor")
    parts = (factors,) if isinstance(factors, Factors) else check.as_tuple("factors", factors, "a Factors")
    if len(pools) != len(parts) or not pools:
        raise ValueError(
            f"pool, factors: expected the same number of layers, at least one, got {len(pools)} and {len(parts)}"
        )
    first = parts[0]
    if not isinstance(first, Factors):
        check.not_a("factors", first, "a Factors or a sequence of them")
    tree, spec = first.tree, first.spec
    if not isinstance(tree, TreeBatch):
        check.not_a("factors[0].tree", tree, "a TreeBatch")
    if not isinstance(spec, RecurrenceSpec):
        check.not_a("factors[0].spec", spec, "a RecurrenceSpec")
    backend = get_backend(tree.device, spec)
    slots = check.check_index("slots", slots, tree.device, tree.max_batch)
    accepted = check.check_index("accepted", accepted, tree.device, tree.max_batch)
    if precision not in check.PRECISIONS:
        raise ValueError(f"precision: {precision!r} is not allowed; allowed: {', '.join(check.PRECISIONS)}")
    if variant is not None:
        check.check_variant(variant, "commit")
    layers = check_layers(pools, parts, backend.name)
    if checks_values(validate, tree.device):
        values.check_status(tree)
        values.check_slots(slots, min(p.shape[0] for p in pools))
        values.check_accepted(accepted, slots, tree)
        for part in parts:
            if part.pending is not None:
                values.check_pending_values(part.pending, slots)
    call = CommitCall(spec, layers, slots, accepted, tree, precision, variant)

    def run() -> None:
        if tree.max_batch:
            backend.commit(call)

    return run


__all__ = ["commit", "verify"]
