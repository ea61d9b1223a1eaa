"""Warm-up of the kernels of a convolution: compile, load and check each before anything is captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch

from bole_runtime.backend_choice import backend_name
from bole_runtime.conv import torch_backend
from bole_runtime.conv.api import conv_commit, tree_conv
from bole_runtime.conv.calls import ConvCall, ConvCommitCall, ConvCommitLayer
from bole_runtime.conv.factors import ConvFactors
from bole_runtime.kernels.conv_problem import ConvProblem
from bole_runtime.kernels.space import Config
from bole_runtime.tree.binary import binary_trees, deepest_node

#: Relative error of an output in its own dtype.
_BOUNDS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}


@dataclass(frozen=True)
class WarmConv:
    """One kernel that was made ready.

    Attributes:
        problem: what it is for.
        config: the configuration that calls take.
        error: relative error of its output against the torch backend; 0 for a commit, which must be exact.
    """

    problem: ConvProblem
    config: Config
    error: float


def warmup_conv(
    *,
    channels: int,
    width: int,
    max_batch: int,
    max_nodes: int,
    max_depth: int | None = None,
    bias: bool = False,
    activation: str | None = "silu",
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype = torch.int32,
    packed: bool = False,
    captured: bool = False,
    layers: int = 1,
    device: torch.device | str | None = None,
) -> list[WarmConv]:
    """Make the kernels ready that ``tree_conv`` and ``conv_commit`` take for a geometry, and check each once.

    Compilation and module loading are not allowed inside a capture of a CUDA graph. Synchronises the device. Does
    nothing on other backends than Triton's. Table entries that wait for a check here get one. Calls with pending inputs
    have kernels of their own, which this leaves out.

    Args:
        channels: C of this rank.
        width: W.
        max_batch: largest number of requests; every power of two up to it is prepared.
        max_nodes: node capacity of the trees.
        max_depth: depth capacity; default ``max_nodes - 1``.
        bias: whether the convolution has one.
        activation: as for ``tree_conv``.
        dtype: of x and of the output.
        weight_dtype: of weight and bias; default, ``dtype``.
        state_dtype: of the pools; default, ``dtype``.
        index_dtype: of slots and accepted nodes.
        packed: prepare packed trees instead of dense ones.
        captured: prepare convolutions that copy x to buffers.
        layers: layers of one commit; above 1 the all-layer launch is prepared too.
        device: default, the current CUDA device, or the CPU without one.

    Returns:
        What was prepared.

    Raises:
        RuntimeError: a kernel disagrees with the torch backend.
        TypeError: a dtype is not allowed.
        ValueError: a size is not allowed.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if backend_name(where) != "triton":
        return []
    make = torch.Generator(device=where).manual_seed(20261129)

    def normal(*shape: int, of: torch.dtype | None) -> torch.Tensor:
        return torch.randn(shape, generator=make, device=where, dtype=torch.float32).to(of or dtype)

    done: list[WarmConv] = []
    seen: set[tuple[ConvProblem, Config]] = set()
    for batch in _batches(max_batch):
        # The kernels do not depend on the batch, only the choice among them does: check with few requests.
        few = min(batch, 2)
        tree = binary_trees(few, max_nodes, max_depth, packed, where)
        call = ConvCall(
            normal(*tree.lead, channels, of=dtype),
            normal(channels, width, of=weight_dtype),
            normal(channels, of=weight_dtype) if bias else None,
            normal(few, channels, width - 1, of=state_dtype),
            torch.arange(few, device=where, dtype=index_dtype),
            tree,
            activation is not None,
            torch.full((*tree.lead, channels), float("nan"), device=where, dtype=dtype),
            capture=ConvFactors.allocate(tree, channels=channels, width=width, dtype=dtype) if captured else None,
        )
        for problem in _problems(call, batch):
            check = partial(_check, call, problem.op, activation, layers)
            config = _choice(problem, where, check)
            if (problem, config) not in seen:
                seen.add((problem, config))
                done.append(WarmConv(problem, config, check(config)))
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return done


def _batches(most: int) -> list[int]:
    return sorted({1 << i for i in range(max(1, most).bit_length())} - {0} | {most}) if most > 0 else []


def _layer(call: ConvCall, pool: torch.Tensor) -> ConvCommitLayer:
    return ConvCommitLayer(pool, ConvFactors(call.x, call.width, call.tree))


def _problems(call: ConvCall, batch: int) -> tuple[ConvProblem, ...]:
    """Return the problems of a call and of its commit at a batch."""
    from bole_runtime.backends.triton_backend import select
    from bole_runtime.conv.triton_backend import commit_problem, conv_problem

    work = select.buckets("tree_conv", call.tree.max_nodes, call.tree.max_depth, 0, batch, 1)[3]
    commit = ConvCommitCall((_layer(call, call.state),), call.slots, call.slots, call.tree)
    return conv_problem(call).replace(work=work), commit_problem(commit, commit.layers[0]).replace(work=work)


def _choice(problem: ConvProblem, device: torch.device, check: Callable[[Config], float]) -> Config:
    """Return the configuration that serves a problem, once table entries that wait for a check have had one."""
    from bole_runtime.backends.triton_backend import select

    if device.type == "cuda":
        from bole_runtime.tables.lookup import dispatcher

        index = device.index if device.index is not None else torch.cuda.current_device()
        name, limits = select.limits_of(index)
        for entry in dispatcher().unchecked(problem, name, limits):
            try:
                check(entry.config)
            except Exception:  # It keeps waiting, and what comes after it serves.
                continue
            dispatcher().mark_checked(entry, name)
            select.clear()
            break
    return select.choose(problem, device, None)[0]


def _check(call: ConvCall, op: str, activation: str | None, layers: int, config: Config) -> float:
    """Return the error of a configuration; 0 for a commit.

    Raises:
        RuntimeError: it disagrees with the torch backend.
    """
    if op == "tree_conv":
        return _check_conv(call, config, activation)
    for count in sorted({1, layers}):
        _check_commit(call, config, count)
    return 0.0


def _fail(what: str, config: Config, how: str) -> NoReturn:
    raise RuntimeError(
        f"{what} with {config} {how} here: pin another configuration with variant=, or set BOLE_BACKEND=torch"
    )


def _check_conv(call: ConvCall, config: Config, activation: str | None) -> float:
    out, factors = tree_conv(
        call.x, call.weight, call.bias, state=call.state, slots=call.slots, tree=call.tree, activation=activation,
        out=call.out, factors=call.capture, variant=config, validate=False,
    )  # fmt: skip
    exact = torch.empty(out.shape, dtype=torch.float64, device=out.device)
    wide = call.state.double()
    torch_backend.tree_conv(ConvCall(call.x, call.weight, call.bias, wide, call.slots, call.tree, call.silu, exact))
    error = float((out.double() - exact).norm() / exact.norm().clamp_min(1e-30))
    if not error <= _BOUNDS[out.dtype]:
        _fail("tree_conv", config, f"is off by {error:.1e}, {_BOUNDS[out.dtype]:.1e} is allowed,")
    if call.capture is not None and not torch.equal(factors.x, call.x):
        _fail("tree_conv", config, "copies other factors")
    return error


def _check_commit(call: ConvCall, config: Config, layers: int) -> None:
    accepted = torch.full_like(call.slots, deepest_node(call.tree))
    pools = [call.state.clone() for _ in range(layers)]
    parts = [ConvFactors(call.x, call.width, call.tree) for _ in pools]
    conv_commit(pools, call.slots, parts, accepted, variant=config, validate=False)
    want = call.state.clone()
    torch_backend.conv_commit(ConvCommitCall((_layer(call, want),), call.slots, accepted, call.tree))
    if not all(torch.equal(pool, want) for pool in pools):
        _fail("conv_commit", config, "stores other states")
