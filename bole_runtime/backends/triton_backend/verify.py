"""Verification with generated kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bole_runtime.backends.scratch import allocate
from bole_runtime.backends.triton_backend.reach import REACH, check_reach
from bole_runtime.backends.triton_backend.select import SHORT, buckets, choose, short_dtype
from bole_runtime.kernels.gates import gate_layout
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.variants import get_variant, served

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bole_runtime.calls import VerifyCall
    from bole_runtime.factors import PendingChain
    from bole_runtime.kernels.gates import GateLayout


def rows_strides(tensor: torch.Tensor, packed: bool) -> tuple[int, ...]:
    """Strides over requests, nodes and heads; a packed tensor has stride 0 over requests."""
    stride = tensor.stride()
    return (0, stride[0], stride[1]) if packed else stride[:3]


def option_values(layout: GateLayout, beta_scale: float, options: Mapping[str, float]) -> tuple[float, ...]:
    """Return the floats that kernels take, those of other gate modes included."""
    return tuple(beta_scale if name == "beta_scale" else options.get(name, usual) for name, usual in layout.options)


def chain_tensors(layout: GateLayout, pending: PendingChain) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a pending chain in the order of kernel arguments."""
    gates = pending.gates
    return (pending.k, pending.v, *(gates[name] for name in layout.kept), pending.length, pending.start)


def chain_sizes(layout: GateLayout, pending: PendingChain) -> tuple[int, ...]:
    """Return capacity and strides of a pending chain in the order of kernel arguments."""
    gates = kept_strides(layout, pending.gates, False)
    return (pending.capacity, *pending.k.stride()[:3], *pending.v.stride()[:3], *gates)


def kept_strides(layout: GateLayout, gates: Mapping[str, torch.Tensor], packed: bool) -> tuple[int, ...]:
    """Return the strides of gates in buffers of Bole's own. Ready ones have one layout, and their heads stride 1."""
    if layout.keeps_ready:
        return rows_strides(gates[layout.kept[0]], packed)[:2] if layout.kept else ()
    return tuple(s for name in layout.kept for s in rows_strides(gates[name], packed))


def gate_strides(layout: GateLayout, gates: Mapping[str, torch.Tensor], packed: bool) -> tuple[int, ...]:
    """Return the strides of the gates of a call, and those over heads of parameters that are vectors."""
    strides = [s for name in layout.nodes for s in rows_strides(gates[name], packed)]
    if layout.vectors:
        strides += [gates[n].stride(0) if n in gates else 0 for n in layout.parameters if n in layout.vectors]
    return tuple(strides)


def verify_problem(call: VerifyCall) -> Problem:
    """Return what the kernels of a call are specialised for."""
    heads, dv = call.v.shape[-2:]
    key_heads, dk = call.k.shape[-2:]
    tree, pending = call.tree, call.pending
    nodes, depth, capacity, work = buckets(
        "verify", tree.max_nodes, tree.max_depth, 0 if pending is None else pending.capacity, call.slots.shape[0], heads
    )
    return Problem(
        "verify",
        call.spec.name,
        dk,
        dv,
        heads // key_heads,
        SHORT.get(call.q.dtype) or short_dtype(call.q, "q"),
        SHORT.get(call.state.dtype) or short_dtype(call.state, "state"),
        call.gate_mode,
        call.precision,
        nodes,
        depth,
        capacity,
        work,
        call.qk_l2norm,
    )


def _check_reach(call: VerifyCall) -> None:
    q, k, v, out, state, nodes = call.q, call.k, call.v, call.out, call.state, call.tree.max_nodes
    rows = max(q.stride(-3), k.stride(-3), v.stride(-3), out.stride(-3)) * nodes
    heads = max(q.stride(-2), k.stride(-2), v.stride(-2), out.stride(-2)) * v.shape[-2]
    # One test for the usual case; the calls below it find out what is too far.
    if rows > REACH or heads > REACH or state.stride(2) * state.shape[2] > REACH:
        for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
            check_reach(name, tensor, nodes)
        check_reach("state", state.transpose(1, 2), state.shape[2])
    if call.pending is not None:
        check_reach("pending.k", call.pending.k, call.pending.capacity)
        check_reach("pending.v", call.pending.v, call.pending.capacity)


def _workspace(call: VerifyCall, sizes: tuple[int, int]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    total = sum(sizes)
    if total == 0:
        return None, None
    work = call.workspace
    if work is None:
        work = allocate(total, call.q.device)
    else:
        have = work.numel() * work.element_size() // 4
        if have < total:
            raise ValueError(f"workspace: {have * 4} bytes are too few, this call needs {total * 4}")
        work = work.view(-1).view(torch.float32)
    return work[: sizes[0]], work[sizes[0] : total]


def _without_kernels(call: VerifyCall, problem: Problem) -> None:
    from bole_runtime import backends
    from bole_runtime.backends import torch_backend

    backends.without_kernels(call.spec, f"{problem.nodes} nodes and {problem.pending} pending tokens")
    torch_backend.verify(call)


def verify(call: VerifyCall) -> None:
    """Fill ``call.out`` (and ``call.capture``) for one call; no host synchronisation."""
    batch, heads = call.slots.shape[0], call.v.shape[-2]
    if batch == 0 or call.v.shape[-3] == 0:
        return
    _check_reach(call)
    problem = verify_problem(call)
    if (call.spec.decay == "channel" or not call.spec.plain) and call.variant is None and not served(problem):
        _without_kernels(call, problem)
        return
    config, kernels = choose(problem, call.q.device, call.variant)
    variant = get_variant("verify", config.variant)
    work, weights = _workspace(call, variant.workspace(problem, config, batch, heads))
    tree, packed, capture, pending = call.tree, call.tree.is_packed, call.capture, call.pending
    layout, gates = gate_layout(call.spec.name, call.gate_mode), call.gates
    words = tree.ancestors.stride()
    captured: tuple[Any, ...] = (None,) * (2 + len(layout.kept))
    capture_strides = (0,) * (4 + layout.kept_strides)
    if capture is not None:
        captured = (capture.k, capture.v, *(capture.gates[name] for name in layout.kept))
        capture_strides = tuple(s for t in captured[:2] for s in rows_strides(t, packed)[:2])
        capture_strides += kept_strides(layout, capture.gates, packed)
    chain: tuple[Any, ...] = ()
    if pending is not None:
        chain = (*chain_tensors(layout, pending), *chain_sizes(layout, pending))
    args = (
        call.q,
        call.k,
        call.v,
        *[gates.get(name) for name in layout.verify_tensors],
        call.state,
        call.slots,
        tree.ancestors,
        tree.offsets,
        tree.depths,
        call.out,
        *captured,
        work,
        weights,
        *chain,
        tree.max_nodes if packed else call.q.shape[1],
        heads,
        batch,
        call.state.shape[0],
        call.scale,
        *option_values(layout, call.beta_scale, call.options),
        *rows_strides(call.q, packed),
        *rows_strides(call.k, packed),
        *rows_strides(call.v, packed),
        *gate_strides(layout, gates, packed),
        *rows_strides(call.out, packed),
        *((0, words[0]) if packed else words[:2]),
        *call.state.stride()[:3],
        *capture_strides,
    )
    for kernel, grid in zip(kernels, variant.grids(problem, config, batch, heads), strict=True):
        kernel.launch(grid, args)
