"""Families that only add: linear attention, retention, lightning attention, simple GLA and GLA.

S_i = D_i o S_p + v_i k_i^T,   o_i = S_i q_i
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.families.activations import log_sigmoid
from bole_runtime.families.shared import QKV, node_gate, option, parameter
from bole_runtime.families.spec import RecurrenceSpec


def _from_raw(gates: Mapping[str, torch.Tensor], options: Mapping[str, float]) -> dict[str, torch.Tensor]:
    return {"g": log_sigmoid(gates["gk"].double()) / options["normalizer"]}


LINEAR = RecurrenceSpec(
    name="linear_attention",
    title="Linear attention",
    decay="none",
    erase="none",
    qk_l2norm=False,
    l2norm_eps=1e-6,
    scale="rsqrt_dk",
    inputs=QKV,
    kernels=True,
)

RETENTION = RecurrenceSpec(
    name="retention",
    title="Retention",
    decay="head",
    erase="none",
    qk_l2norm=False,
    l2norm_eps=1e-6,
    scale="rsqrt_dk",
    inputs=(*QKV, parameter("g", "ready", "log-decay of a head, log(1 - 2^(-5 - h))", role="log_decay")),
    kernels=True,
)

LIGHTNING = RecurrenceSpec(
    name="lightning",
    title="Lightning attention",
    decay="head",
    erase="none",
    qk_l2norm=False,
    l2norm_eps=1e-6,
    scale="one",
    inputs=(*QKV, parameter("g", "ready", "log-decay of a head, minus its slope", role="log_decay")),
    kernels=True,
)

SIMPLE_GLA = RecurrenceSpec(
    name="simple_gla",
    title="Simple GLA",
    decay="scalar",
    erase="none",
    qk_l2norm=False,
    l2norm_eps=1e-6,
    scale="rsqrt_dk",
    inputs=(
        *QKV,
        node_gate("g", "log_decay", "ready", "log-decay, at most 0"),
        node_gate("gk", "log_decay", "raw", "g = log sigmoid(gk) / normalizer"),
        option("normalizer", "raw", 16.0, "divides the log of the sigmoid", low=1e-3),
    ),
    make_ready={"raw": _from_raw},
    kernels=True,
    gate_formula="log_sigmoid",
)

GLA = RecurrenceSpec(
    name="gla",
    title="Gated linear attention",
    decay="channel",
    erase="none",
    qk_l2norm=False,
    l2norm_eps=1e-6,
    scale="rsqrt_dk",
    inputs=(
        *QKV,
        node_gate("g", "log_decay", "ready", "log-decay of a key channel, at most 0", "dk"),
        node_gate("gk", "log_decay", "raw", "g = log sigmoid(gk) / normalizer", "dk"),
        option("normalizer", "raw", 16.0, "divides the log of the sigmoid", low=1e-3),
    ),
    make_ready={"raw": _from_raw},
    kernels=True,
    gate_formula="log_sigmoid",
)


def retention_log_decay(heads: int) -> torch.Tensor:
    """Return the fixed log-decay of each retention head, float64 [heads]: log(1 - 2^(-5 - h))."""
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(heads, dtype=torch.float64)))


def lightning_log_decay(heads: int, layer: int | None = None, layers: int | None = None) -> torch.Tensor:
    """Return the fixed log-decay of each lightning head, float64 [heads]: minus the ALiBi slope 2^(-8 (h + 1) / heads).

    Args:
        heads: heads of the whole model, before tensor parallelism; slice the result for a rank.
        layer: index of the layer among all ``layers``, for models that scale the slope by 1 - layer / (layers - 1) +
            1e-5; None for those that do not.
        layers: layers of the model, with ``layer``.

    Raises:
        ValueError: only one of ``layer`` and ``layers`` is given, or the layer is outside the model.
    """
    slopes = torch.exp2(-8.0 / heads * (torch.arange(heads, dtype=torch.float64) + 1))
    if layer is None and layers is None:
        return -slopes
    if layer is None or layers is None or not 0 <= layer < layers or layers < 2:
        raise ValueError(f"layer, layers: expected 0 <= layer < layers and at least 2 layers, got {layer} and {layers}")
    return -slopes * (1 - layer / (layers - 1) + 1e-5)
