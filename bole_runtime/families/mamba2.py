"""Mamba2 (SSD): scalar decay, additive, with a skip term. q is C, k is B, v is x; HK counts the groups.

S_i = e^{g_i} S_p + dt_i x_i B_i^T,   o_i = S_i C_i + D x_i,   g_i = -exp(A_log) dt_i
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.families.activations import softplus
from bole_runtime.families.shared import QKV, node_gate, option, parameter
from bole_runtime.families.spec import RecurrenceSpec


def _from_raw(gates: Mapping[str, torch.Tensor], options: Mapping[str, float]) -> dict[str, torch.Tensor]:
    dt = gates["dt_raw"].double()
    bias = gates.get("dt_bias")
    if bias is not None:
        dt = dt + bias.double()
    dt = softplus(dt).clamp(options["dt_min"], options["dt_max"])
    return {"g": -gates["A_log"].double().exp() * dt, "dt": dt}


MAMBA2 = RecurrenceSpec(
    name="mamba2",
    title="Mamba2 (SSD)",
    decay="scalar",
    erase="none",
    qk_l2norm=False,
    l2norm_eps=1e-6,
    scale="one",
    inputs=(
        *QKV,
        node_gate("g", "log_decay", "ready", "log-decay, -exp(A_log) dt"),
        node_gate("dt", "write_gate", "ready", "step size"),
        node_gate("dt_raw", "log_decay", "raw", "dt = softplus(dt_raw + dt_bias), clamped to [dt_min, dt_max]"),
        parameter("A_log", "raw", "log of the decay rate of a head"),
        parameter("dt_bias", "raw", "bias of dt_raw", optional=True),
        parameter("D", "both", "weight of the skip term D x; no skip without it", optional=True),
        option("dt_min", "raw", 0.0, "lower limit of dt", low=0.0),
        option("dt_max", "raw", float("inf"), "upper limit of dt", low=0.0),
    ),
    make_ready={"raw": _from_raw},
    write_value=("v", "dt"),
    skip=("v", "D"),
    kernels=True,
    gate_formula="softplus_step",
)
