"""What is timed at a point, behind one interface: Bole in each profile and configuration, and the peers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from peers import Peer, PreparedPeer
from torch import Tensor

import bole_runtime.api as api
from bole_codegen.measure import LayerInputs, VerifyInputs, poison_
from bole_runtime.factors import Factors, PendingChain
from bole_runtime.kernels.space import Config
from bole_runtime.precision import OUTPUT_BOUND
from bole_runtime.tree import TreeBatch
from verify_bench.settings import NARROW_STATE_BOUND

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parse_config(text: str) -> Config:
    """Parse a pinned verify configuration as it is printed: ``fused(BLOCK_V=16, num_warps=4)``.

    Raises:
        ValueError: another form, an unknown variant, or a value outside its declared choices.
    """
    from bole_runtime.kernels.variants import get_variant

    match = re.fullmatch(r"\s*(\w+)\s*\((.*)\)\s*", text)
    if not match:
        raise ValueError(f"expected VARIANT(NAME=VALUE, ...), got {text!r}")
    values: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in match.group(2).split(","))):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"expected NAME=VALUE in {text!r}, got {part!r}")
        try:
            values[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            # A bare word is a string choice.
            values[name.strip()] = value.strip()
    return get_variant("verify", match.group(1)).config(values)


@dataclass
class Candidate:
    """One column of the benchmark.

    Attributes:
        name: column name.
        profile: ``fast`` or ``lossless``, the error it is held to.
        make_layer: index to a callable that enqueues one layer.
        output: index to the output of the latest launch, ``[B, N, HV, dv]``.
        poison: fills scratch and outputs that a launch must write.
        variant: configuration that is dispatched.
        workspace_bytes: scratch a call needs.
        bound: relative error allowed before the rounding of the output's own dtype.
        exact: index to an fp32 output computed once outside the timing, or None where that cannot be had.
        factors: index to the factors of the latest call.
        peer: what a peer was prepared to, or None for Bole.
        includes: what one call does.
        commits: whether a call also commits the round before it.
    """

    name: str
    profile: str
    make_layer: Callable[[int], Callable[[], object]]
    output: Callable[[int], Tensor]
    poison: Callable[[], None]
    bound: float
    variant: str = ""
    workspace_bytes: int = 0
    exact: Callable[[int], Tensor] | None = None
    factors: dict[int, Factors] = field(default_factory=dict)
    peer: PreparedPeer | None = None
    includes: str = ""
    commits: bool = False


def _describe(
    inputs: VerifyInputs, layer: LayerInputs, tree: TreeBatch, profile: str, pinned: Any, pending: PendingChain | None
) -> Any:
    """Return (configuration, workspace bytes) that the Triton backend dispatches for a layer."""
    from bole_runtime.backends.triton_backend.select import choose
    from bole_runtime.backends.triton_backend.verify import verify_problem
    from bole_runtime.calls import VerifyCall
    from bole_runtime.families import get_family
    from bole_runtime.kernels.variants import get_variant

    spec = get_family(inputs.workload.family)
    mode = inputs.workload.gate_mode
    options = {i.name: i.default or 0.0 for i in spec.options(mode) if i.name != "beta_scale"}
    call = VerifyCall(
        spec, layer.q, layer.k, layer.v, layer.gates(mode), mode, 1.0, layer.state, inputs.slots, tree, profile,
        spec.default_scale(layer.q.shape[-1]), spec.qk_l2norm, layer.v, pending, options=options,
    )  # fmt: skip
    problem = verify_problem(call)
    config = choose(problem, layer.q.device, pinned)[0]
    elements = get_variant("verify", config.variant).workspace(problem, config, inputs.workload.batch, layer.v.shape[2])
    return config, 4 * sum(elements)


def bole_candidate(
    name: str,
    profile: str,
    inputs: VerifyInputs,
    tree: TreeBatch,
    factors: list[Factors] | None,
    pinned: Config | None,
    pending: list[PendingChain] | None = None,
) -> Candidate:
    """Bind Bole's ``verify`` to a point.

    Args:
        name: column name.
        profile: ``fast`` or ``lossless``.
        inputs: layers and slots.
        tree: the trees of all layers.
        factors: capture buffers, one a layer, or None to alias the inputs.
        pinned: configuration instead of the tables' choice.
        pending: chains above the roots, one a layer, or None.
    """
    work = inputs.workload
    dtype = TORCH_DTYPES[work.out_dtype]
    outs = [torch.empty(layer.v.shape, dtype=dtype, device=layer.v.device) for layer in inputs.layers]
    kept: dict[int, Factors] = {}

    def call(index: int, out: Tensor) -> None:
        layer = inputs.layers[index]
        _, kept[index] = api.verify(
            layer.q,
            layer.k,
            layer.v,
            gates=layer.gates(work.gate_mode),
            state=layer.state,
            slots=inputs.slots,
            tree=tree,
            recurrence=work.family,
            precision=profile,
            out=out,
            factors=None if factors is None else factors[index],
            pending=None if pending is None else pending[index],
            variant=pinned,
            validate=False,
        )

    def exact(index: int) -> Tensor:
        out = poison_(torch.empty(outs[index].shape, dtype=torch.float32, device=outs[index].device))
        call(index, out)
        return out

    def poison() -> None:
        for out in outs:
            poison_(out)
        for part in factors or ():
            for tensor in (part.k, part.v, *part.gates.values()):
                poison_(tensor)

    from bole_runtime.backend_choice import backend_name

    backend = backend_name(tree.device)
    config: Any = backend
    scratch = 0
    if backend == "triton":
        config, scratch = _describe(inputs, inputs.layers[0], tree, profile, pinned, pending[0] if pending else None)
    return Candidate(
        name=name,
        profile=profile,
        make_layer=lambda i: lambda: call(i, outs[i]),
        output=lambda i: outs[i],
        poison=poison,
        bound=OUTPUT_BOUND[profile],
        variant=str(config),
        workspace_bytes=scratch,
        exact=exact,
        factors=kept,
        includes=f"verify over {work.pending} pending tokens" if work.pending else "",
    )


def peer_candidate(peer: Peer, prepared: PreparedPeer, inputs: VerifyInputs) -> Candidate:
    """Wrap a prepared peer."""
    layers = len(inputs.layers)
    # A peer that keeps states of nodes in a narrow pool dtype rounds them at every step; its time still counts.
    bound = OUTPUT_BOUND[peer.profile] if inputs.workload.state_dtype == "fp32" else NARROW_STATE_BOUND

    def poison() -> None:
        prepared.poison()
        for index in range(layers):
            try:
                poison_(prepared.output(index))
            except KeyError:
                # Not launched yet: its output does not exist.
                continue

    return Candidate(
        name=peer.name,
        profile=peer.profile,
        make_layer=prepared.make_layer,
        output=prepared.output,
        poison=poison,
        bound=bound,
        variant=peer.version,
        workspace_bytes=prepared.workspace_bytes,
        peer=prepared,
        includes=peer.includes,
        commits=peer.commits,
    )


def captured_factors(inputs: VerifyInputs, tree: TreeBatch) -> list[Factors]:
    """Allocate capture buffers, one set a layer, so that their writes are cold too."""
    work = inputs.workload
    dtype = TORCH_DTYPES[work.in_dtype]
    return [
        Factors.allocate(
            tree,
            key_heads=work.hk,
            value_heads=work.hv,
            dk=work.dk,
            dv=work.dv,
            dtype=dtype,
            recurrence=work.family,
            gate_mode=work.gate_mode,
            # What is kept as given has the width it was given in.
            gate_dtype=dtype if work.gate_mode == "raw" else None,
        )
        for _ in inputs.layers
    ]
