"""Compile, load and check every kernel a geometry can need, before a CUDA graph is captured or traffic arrives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from bole_runtime.api import commit, verify
from bole_runtime.backends import get_backend, torch_backend
from bole_runtime.calls import CommitCall, CommitLayer, VerifyCall
from bole_runtime.factors import Factors
from bole_runtime.families import InputSpec, RecurrenceSpec, get_family
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config
from bole_runtime.precision import OUTPUT_BOUND, STATE_BOUND, STATE_ROUNDING
from bole_runtime.tree.binary import binary_trees, deepest_node
from bole_runtime.validate_warmup import check_device, check_sizes, check_switches, check_types


@dataclass
class WarmupReport:
    """What a warm-up did.

    Attributes:
        checked: problems, with the configuration that a call of that size takes and its error.
        failed: entries that disagreed with the reference here and will not be used, with the reason.
        seconds: wall-clock time.
    """

    checked: list[tuple[Problem, Config, float]] = field(default_factory=list)
    failed: list[tuple[Problem, Config, str]] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        text = f"{len({c for _, c, _ in self.checked})} kernel configurations ready for {len(self.checked)} sizes"
        if self.failed:
            text += f", {len(self.failed)} table entries refused"
        return f"{text}, {self.seconds:.1f} s"


@dataclass(frozen=True)
class _Geometry:
    spec: RecurrenceSpec
    hk: int
    hv: int
    dk: int
    dv: int
    nodes: int
    depth: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    gate_mode: str
    gate_dtype: torch.dtype
    index_dtype: torch.dtype
    packed: bool
    device: torch.device


def _as_tuple(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _batches(max_batch: int) -> Iterable[int]:
    batch = 1
    while batch < max_batch:
        yield batch
        batch *= 2
    yield max_batch


def _gate(g: _Geometry, i: InputSpec, normal: Callable[..., torch.Tensor], lead: tuple[int, ...]) -> torch.Tensor:
    """A gate in the range of trained models. Raw ones have the element type of the model's projections."""
    sizes = i.sizes((g.hk, g.hv), (g.dk, g.dv))
    if i.shape[0] != "node":
        return -normal(*sizes).abs() if i.role == "log_decay" else normal(*sizes)
    x = normal(*lead, *sizes)
    if g.gate_mode == "ready":
        return -x.abs() if i.role == "log_decay" else torch.sigmoid(x)
    return x.to(g.gate_dtype)


def _call(g: _Geometry, batch: int, precision: str, captured: bool) -> VerifyCall:
    """A small call whose kernels are those of a larger one: random inputs, every slot live."""
    make = torch.Generator(device=g.device).manual_seed(20260801 + batch)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make, device=g.device, dtype=torch.float32)

    tree, mode = binary_trees(batch, g.nodes, g.depth, g.packed, g.device), g.gate_mode
    lead = tree.lead
    gates = {i.name: _gate(g, i, normal, lead) for i in (*g.spec.node_gates(mode), *g.spec.parameters(mode))}
    capture = None
    if captured:
        capture = Factors.allocate(
            tree, key_heads=g.hk, value_heads=g.hv, dk=g.dk, dv=g.dv, dtype=g.dtype, recurrence=g.spec, gate_mode=mode
        )
    v = normal(*lead, g.hv, g.dv).to(g.dtype)
    return VerifyCall(
        spec=g.spec,
        q=normal(*lead, g.hk, g.dk).to(g.dtype),
        k=normal(*lead, g.hk, g.dk).to(g.dtype),
        v=v,
        gates=gates,
        gate_mode=mode,
        beta_scale=1.0,
        state=normal(batch, g.hv, g.dv, g.dk).to(g.state_dtype),
        slots=torch.arange(batch, device=g.device, dtype=g.index_dtype),
        tree=tree,
        precision=precision,
        scale=g.spec.default_scale(g.dk),
        qk_l2norm=g.spec.qk_l2norm,
        # fp32, whatever the process makes tensors of: the check is of what the kernel computes.
        out=torch.full(v.shape, float("nan"), device=g.device, dtype=torch.float32),
        capture=capture,
        options={i.name: i.default or 0.0 for i in g.spec.options(mode) if i.name != "beta_scale"},
    )


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    norm = want.double().norm().clamp_min(1e-30)
    error = float((got.double() - want.double()).norm() / norm)
    return error if error == error else float("inf")


def _check_verify(call: VerifyCall, config: Config | None) -> float:
    out, _ = verify(
        call.q, call.k, call.v, gates=call.gates, state=call.state, slots=call.slots, tree=call.tree,
        recurrence=call.spec, precision=call.precision, out=call.out, factors=call.capture, variant=config,
    )  # fmt: skip
    want = VerifyCall(**{name: getattr(call, name) for name in VerifyCall.__slots__})
    want.out, want.capture, want.variant = torch.empty_like(out), None, None
    torch_backend.verify(want)
    return _error(out, want.out)


def _factors(call: VerifyCall) -> Factors:
    return Factors(
        call.spec, call.gate_mode, call.k, call.v, call.gates, call.beta_scale, call.qk_l2norm, call.tree,
        options=call.options,
    )  # fmt: skip


def _check_commit(call: VerifyCall, config: Config | None, layers: int) -> float:
    factors = _factors(call)
    accepted = torch.full_like(call.slots, deepest_node(call.tree))
    pools = [call.state.clone() for _ in range(layers)]
    commit(pools, call.slots, [factors] * layers, accepted, precision=call.precision, variant=config, validate=False)
    want = call.state.float()
    torch_backend.commit(
        CommitCall(call.spec, (CommitLayer(want, factors),), call.slots, accepted, call.tree, call.precision)
    )
    return max(_error(pool, want) for pool in pools)


def warmup(
    *,
    key_heads: int,
    value_heads: int,
    dk: int,
    dv: int,
    max_batch: int,
    max_nodes: int,
    max_depth: int | None = None,
    recurrence: str | RecurrenceSpec = "gdn",
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    gate_mode: str | None = None,
    gate_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype = torch.int32,
    precision: str | Sequence[str] = "lossless",
    packed: bool = False,
    captured: bool = False,
    layers: int = 1,
    device: torch.device | str | None = None,
    progress: Callable[[str], None] | None = None,
) -> WarmupReport:
    """Make every kernel ready that calls of a geometry can take, and check each once against the torch backend.

    Call it before capturing CUDA graphs: compilation and module loading are not allowed inside a capture. Table
    entries that were written under another Triton minor version, or predicted without a GPU, are used only after this
    has checked them on this device; the result is remembered in the user's cache. Synchronises the device.

    Args:
        key_heads: HK of this rank.
        value_heads: HV of this rank.
        dk: key head dimension.
        dv: value head dimension.
        max_batch: largest number of requests; every power of two up to it is prepared.
        max_nodes: node capacity of the trees (``TreeBatch.max_nodes``).
        max_depth: depth capacity; default ``max_nodes - 1``.
        recurrence: family name or spec.
        dtype: of q, k and v.
        state_dtype: of the state pools.
        gate_mode: ``raw`` or ``ready``; default, ``raw`` where the family has such gates.
        gate_dtype: of the raw per-node gate inputs; default, ``dtype``.
        index_dtype: of slots and accepted nodes.
        precision: one profile or several.
        packed: prepare packed trees instead of dense ones.
        captured: prepare verification that copies factors to buffers, and the commit of what they hold.
        layers: layers of one commit; above 1 the all-layer launch is prepared too.
        device: default, the current CUDA device, or the CPU without one.
        progress: called with one line for each size.

    Returns:
        What was checked.

    Raises:
        RuntimeError: what a call would take disagrees with the torch backend.
        TypeError: an argument has a wrong type, or names an element type that calls cannot have.
        ValueError: a geometry, a name or a device is not supported.
    """
    started = time.perf_counter()
    spec = recurrence if isinstance(recurrence, RecurrenceSpec) else get_family(recurrence)
    check_sizes(key_heads, value_heads, dk, dv, max_batch, max_nodes, max_depth, layers)
    check_switches(packed, captured, progress)
    where = check_device(device)
    backend = get_backend(where, spec).name
    check_types(dtype, state_dtype, gate_dtype, index_dtype, precision, backend)
    mode = spec.modes[-1] if gate_mode is None else gate_mode
    if mode not in spec.modes:
        raise ValueError(f"gate_mode: {mode!r} is not allowed for {spec.name!r}; allowed: {', '.join(spec.modes)}")
    report = WarmupReport()
    geometry = _Geometry(
        spec, key_heads, value_heads, dk, dv, max_nodes, max_nodes - 1 if max_depth is None else max_depth, dtype,
        state_dtype, mode, gate_dtype or dtype, index_dtype, packed, where,
    )  # fmt: skip
    if backend != "triton":
        report.seconds = time.perf_counter() - started
        return report
    for profile in _as_tuple(precision):
        for batch in _batches(max_batch):
            _warm_size(geometry, batch, profile, captured, layers, report)
            if progress is not None:
                progress(f"{spec.name} {profile} batch {batch}: {report.checked[-1][1]}")
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    report.seconds = time.perf_counter() - started
    return report


def _warm_size(g: _Geometry, batch: int, precision: str, captured: bool, layers: int, report: WarmupReport) -> None:
    from bole_runtime.backends.triton_backend import select
    from bole_runtime.backends.triton_backend.commit import commit_problem
    from bole_runtime.backends.triton_backend.verify import verify_problem
    from bole_runtime.kernels.variants import served

    # The kernels do not depend on the batch, only the choice among them does: check with few requests.
    call = _call(g, min(batch, 2), precision, captured)
    # Captured factors hold ready gates where those are one value a head, and that is what their commit reads.
    kept = replace(g, gate_mode=g.spec.kept_mode(g.gate_mode)) if captured else g
    alone = _call(kept, min(batch, 2), precision, False) if captured else call
    work = select.buckets("verify", g.nodes, g.depth, 0, batch, g.hv)[3]
    layer = CommitLayer(alone.state, _factors(alone))
    commit_call = CommitCall(call.spec, (layer,), alone.slots, alone.slots, alone.tree, precision)
    verify_bound = OUTPUT_BOUND[precision]
    commit_bound = STATE_BOUND[precision] + STATE_ROUNDING[select.SHORT[g.state_dtype]]
    problems: list[tuple[Problem, Callable[[Config], float], float]] = [
        (verify_problem(call).replace(work=work), lambda c: _check_verify(call, c), verify_bound),
        (
            commit_problem(commit_call, layer).replace(work=work),
            lambda c: max(_check_commit(alone, c, n) for n in sorted({1, layers})),
            commit_bound,
        ),
    ]
    for problem, check, bound in problems:
        if not served(problem):
            continue  # The torch backend serves it.
        if g.device.type == "cuda":
            _admit(problem, check, bound, g.device, report)
        config, _ = select.choose(problem, g.device, None)
        error = check(config)
        if not error <= bound:
            raise RuntimeError(
                f"{problem.key()} with {config} is off by {error:.1e} here, the profile allows {bound:.1e}: pin "
                "another configuration with variant=, retune with bole-tune, or set BOLE_BACKEND=torch"
            )
        report.checked.append((problem, config, error))


def _admit(
    problem: Problem, check: Callable[[Config], float], bound: float, device: torch.device, report: WarmupReport
) -> None:
    """Check the entries that would be preferred if they were trusted, until one is right."""
    from bole_runtime.backends.triton_backend import select
    from bole_runtime.tables.lookup import dispatcher

    index = device.index if device.index is not None else torch.cuda.current_device()
    name, limits = select.limits_of(index)
    for entry in dispatcher().unchecked(problem, name, limits):
        try:
            error = check(entry.config)
        except Exception as failure:
            report.failed.append((problem, entry.config, f"{type(failure).__name__}: {failure}"))
            continue
        if error <= bound:
            dispatcher().mark_checked(entry, name)
            select.clear()
            return
        report.failed.append((problem, entry.config, f"off by {error:.1e}, the profile allows {bound:.1e}"))
