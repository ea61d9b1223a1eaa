"""Kimi Delta Attention: a decay per key channel, delta rule on the decayed state.

S_i = S_p diag(e^{g_i}) + u_i k_i^T,   u_i = beta_i (v_i - S_p diag(e^{g_i}) k_i),   o_i = S_i q_i
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.families.activations import softplus
from bole_runtime.families.shared import QKV, node_gate, option, parameter
from bole_runtime.families.spec import RecurrenceSpec


def _from_raw(gates: Mapping[str, torch.Tensor], options: Mapping[str, float]) -> dict[str, torch.Tensor]:
    f, rate = gates["f"].double(), gates["A_log"].double().exp().unsqueeze(-1)
    bias = gates.get("dt_bias")
    if bias is not None:
        f = f + bias.double()
    bound = options["lower_bound"]
    return {
        "g": bound * torch.sigmoid(rate * f) if bound else -rate * softplus(f),
        "beta": options["beta_scale"] * torch.sigmoid(gates["b"].double()),
    }


KDA = RecurrenceSpec(
    name="kda",
    title="Kimi Delta Attention",
    decay="channel",
    erase="decayed",
    qk_l2norm=True,
    l2norm_eps=1e-6,
    scale="rsqrt_dk",
    inputs=(
        *QKV,
        node_gate("g", "log_decay", "ready", "log-decay of a key channel, at most 0", "dk"),
        node_gate("beta", "write_gate", "ready", "write gate"),
        node_gate("f", "log_decay", "raw", "g = -exp(A_log) softplus(f + dt_bias), or the bounded form", "dk"),
        node_gate("b", "write_gate", "raw", "beta = beta_scale sigmoid(b)"),
        parameter("A_log", "raw", "log of the decay rate of a head"),
        parameter("dt_bias", "raw", "bias of f", "dk", optional=True),
        option("lower_bound", "raw", 0.0, "below 0: g = lower_bound sigmoid(exp(A_log) (f + dt_bias))", high=0.0),
        option("beta_scale", "raw", 1.0, "factor of sigmoid(b)"),
    ),
    make_ready={"raw": _from_raw},
    erase_key=("k", "beta"),
    erase_write=("k",),
    write_value=("v", "beta"),
    kernels=True,
    gate_formula="bounded_sigmoid",
)
