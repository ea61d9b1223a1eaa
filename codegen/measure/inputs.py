"""Realistic random inputs: several layers that share nothing, random slots, gates as a trained model has them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bole_codegen.measure.traffic import Workload
from bole_codegen.measure.trees import make_parents, tree_depth
from bole_runtime.families import get_family
from bole_runtime.kernels.problem import Problem

TORCH_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class LayerInputs:
    """Tensors of one layer.

    Attributes:
        q: ``[B, N, HK, dk]``, not normalised.
        k: ``[B, N, HK, dk]``, not normalised.
        v: ``[B, N, HV, dv]``.
        raw: the model's gate inputs: per node, such as ``a`` and ``b`` ``[B, N, HV]``, in the input dtype, parameters
            such as ``A_log`` and ``dt_bias`` ``[HV]`` in fp32. Empty for a family without any.
        ready: the equal ready gates, such as ``g`` and ``beta`` ``[B, N, HV]``, fp32, rounded once from fp64.
        state: pool ``[slots, HV, dv, dk]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    raw: dict[str, Tensor]
    ready: dict[str, Tensor]
    state: Tensor

    def gates(self, mode: str) -> dict[str, Tensor]:
        """Return the gates for ``raw`` or ``ready`` mode.

        Raises:
            ValueError: another mode.
        """
        if mode not in ("raw", "ready"):
            raise ValueError(f"gate mode must be 'raw' or 'ready', got {mode!r}")
        return self.raw if mode == "raw" else self.ready


@dataclass(frozen=True)
class VerifyInputs:
    """Inputs of one benchmark point.

    Attributes:
        layers: one entry a layer, no tensor shared between two.
        parents: int32 ``[B, N]``, on the device of the inputs.
        slots: int32 ``[B]``, a random choice of distinct slots, the same for all layers (as an engine does).
        depth: largest number of strict ancestors.
        workload: sizes and dtypes, for bytes and operations.
    """

    layers: tuple[LayerInputs, ...]
    parents: Tensor
    slots: Tensor
    depth: int
    workload: Workload

    @property
    def parents_host(self) -> NDArray[np.int32]:
        """Parents as numpy on the host."""
        return np.asarray(self.parents.cpu().numpy(), dtype=np.int32)


def ready_gates(raw: dict[str, Tensor], beta_scale: float = 1.0) -> dict[str, Tensor]:
    """Compute g = -exp(A_log) softplus(a + dt_bias) and beta = beta_scale sigmoid(b) in fp64, returned in fp32."""
    a, b = raw["a"].double(), raw["b"].double()
    x = a + raw["dt_bias"].double()
    softplus = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    g = -torch.exp(raw["A_log"].double()) * softplus
    return {"g": g.float(), "beta": (beta_scale * torch.sigmoid(b)).float()}


def _family_gates(
    work: Workload, normal: Callable[..., Tensor], uniform: Callable[..., Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Draw raw and equal ready gates of a family other than Gated DeltaNet, from its declaration."""
    spec, dtype, lead = get_family(work.family), TORCH_DTYPES[work.in_dtype], (work.batch, work.nodes)
    raw: dict[str, Tensor] = {}
    ready: dict[str, Tensor] = {}
    if "raw" in spec.modes:
        for i in (*spec.node_gates("raw"), *spec.parameters("raw")):
            sizes = i.sizes((work.hk, work.hv), (work.dk, work.dv))
            raw[i.name] = (
                normal(*lead, *sizes).to(dtype) if i.shape[0] == "node" else _parameter(i.name, sizes, uniform)
            )
        options = {i.name: i.default or 0.0 for i in spec.options("raw")}
        ready = {name: t.float() for name, t in spec.make_ready["raw"](raw, options).items()}
        return raw, {**ready, **{i.name: raw[i.name] for i in spec.gates("ready") if i.mode == "both" and i.shape}}
    for i in (*spec.node_gates("ready"), *spec.parameters("ready")):
        shape = (*(lead if i.shape[0] == "node" else ()), *i.sizes((work.hk, work.hv), (work.dk, work.dv)))
        ready[i.name] = -uniform(*shape) if i.role == "log_decay" else uniform(*shape)
    return raw, ready


def _parameter(name: str, sizes: tuple[int, ...], uniform: Callable[..., Tensor]) -> Tensor:
    """Draw a parameter as trained models have it; see :func:`make_layer_inputs`."""
    if name == "A_log":
        return torch.log(uniform(*sizes) * 16 + 1e-3)
    if name == "dt_bias":
        dt = torch.exp(uniform(*sizes) * (math.log(0.1) - math.log(1e-3)) + math.log(1e-3))
        return dt + torch.log(-torch.expm1(-dt))
    return uniform(*sizes)


def make_layer_inputs(
    work: Workload, slots: int, generator: torch.Generator, device: torch.device | str
) -> LayerInputs:
    """Draw one layer's tensors.

    Gates follow the usual initialisation of gated delta-rule models: A uniform in (0, 16), dt log-uniform in
    [1e-3, 0.1], a and b normal, so heads range from nearly no decay to a few tokens of memory.
    """
    dtype = TORCH_DTYPES[work.in_dtype]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device, dtype=torch.float32)

    b, n = work.batch, work.nodes
    q = normal(b, n, work.hk, work.dk).to(dtype)
    k = normal(b, n, work.hk, work.dk).to(dtype)
    v = normal(b, n, work.hv, work.dv).to(dtype)
    if work.family == "gdn":
        dt = torch.exp(uniform(work.hv) * (math.log(0.1) - math.log(1e-3)) + math.log(1e-3))
        raw = {
            "a": normal(b, n, work.hv).to(dtype),
            "b": normal(b, n, work.hv).to(dtype),
            "A_log": torch.log(uniform(work.hv) * 16 + 1e-3),
            # Inverse of softplus, so that softplus(dt_bias) = dt.
            "dt_bias": dt + torch.log(-torch.expm1(-dt)),
        }
        ready = ready_gates(raw)
    else:
        raw, ready = _family_gates(work, normal, uniform)
    state = torch.empty((slots, work.hv, work.dv, work.dk), dtype=TORCH_DTYPES[work.state_dtype], device=device)
    # Slot by slot: a fp32 copy of a whole bf16 pool would double the peak memory.
    for s in range(slots):
        state[s] = normal(work.hv, work.dv, work.dk).to(state.dtype)
    return LayerInputs(q, k, v, raw, ready, state)


def make_verify_inputs(
    problem: Problem,
    key_heads: int,
    value_heads: int,
    batch: int,
    nodes: int,
    shape: str = "ragged",
    layers: int = 1,
    seed: int = 0,
    device: torch.device | str | None = None,
    extra_slots: int = 2,
    out_dtype: str | None = None,
) -> VerifyInputs:
    """Draw the inputs of one benchmark point.

    Args:
        problem: gives head dims, dtypes and gate mode; its buckets are not used.
        key_heads: HK.
        value_heads: HV, a multiple of HK.
        batch: B.
        nodes: N of every request.
        shape: tree shape, see ``make_parents``.
        layers: layers with tensors of their own.
        seed: every seed gives other values, slots and random trees.
        device: CUDA if there is one, else CPU.
        extra_slots: slots in the pool that no request uses, so that a wrong slot is a wrong answer.
        out_dtype: output element type for the byte count; the input type if None.

    Returns:
        Tensors on ``device``.

    Raises:
        ValueError: sizes that do not fit together, or an unknown shape.
    """
    if key_heads < 1 or value_heads % key_heads:
        raise ValueError(f"value heads must be a multiple of key heads, got {value_heads} and {key_heads}")
    if batch < 1 or layers < 1 or extra_slots < 0:
        raise ValueError(f"need batch, layers >= 1 and extra_slots >= 0, got {batch}, {layers}, {extra_slots}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    work = Workload(
        batch=batch,
        nodes=nodes,
        hk=key_heads,
        hv=value_heads,
        dk=problem.dk,
        dv=problem.dv,
        in_dtype=problem.in_dtype,
        state_dtype=problem.state_dtype,
        out_dtype=out_dtype or problem.in_dtype,
        gate_mode=problem.gate_mode,
        family=problem.family,
    )
    parents = make_parents(shape, batch, nodes, seed)
    generator = torch.Generator(device=device).manual_seed(seed)
    pool = batch + extra_slots
    slots = np.random.default_rng(seed + 1).permutation(pool)[:batch].astype(np.int32)
    drawn = tuple(make_layer_inputs(work, pool, generator, device) for _ in range(layers))
    return VerifyInputs(
        layers=drawn,
        parents=torch.from_numpy(parents).to(device),
        slots=torch.from_numpy(slots).to(device),
        depth=tree_depth(parents),
        workload=work,
    )


def input_bytes_per_layer(work: Workload, extra_slots: int = 2) -> int:
    """Device bytes of a layer of :func:`make_verify_inputs`, its output and captured factors, for a memory cap."""
    item = TORCH_DTYPES[work.in_dtype].itemsize
    tokens = work.batch * work.nodes
    pool = work.state_bytes // work.batch * (work.batch + extra_slots)
    gates = tokens * (work.hv * (2 * item + 8) if work.family == "gdn" else work.drawn_gate_bytes_per_node)
    rows = tokens * (2 * work.hk * work.dk + work.hv * work.dv) * item
    return pool + rows + gates + tokens * (work.hv * work.dv * 4 + work.factor_bytes_per_node)
