"""Comba: scalar decay; what is erased is read from the state BEFORE decay with a feedback key of its own.

S_i = e^{g_i} S_p + u_i k_i^T,   u_i = beta_i (v_i - S_p p_i),   o_i = S_i q_i

The correction of the query (q - D p) is the caller's, before this layer's l2 norm, as in the published layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.families.activations import softplus
from bole_runtime.families.shared import QKV, node_gate, option, parameter
from bole_runtime.families.spec import RecurrenceSpec


def _from_raw(gates: Mapping[str, torch.Tensor], options: Mapping[str, float]) -> dict[str, torch.Tensor]:
    rate = torch.exp(gates["A_log"].double())
    return {
        "g": -rate * softplus(gates["a"].double() + gates["dt_bias"].double()),
        "beta": options["beta_scale"] * torch.sigmoid(gates["b"].double()),
    }


COMBA = RecurrenceSpec(
    name="comba",
    title="Comba",
    decay="scalar",
    erase="undecayed",
    qk_l2norm=True,
    l2norm_eps=1e-6,
    scale="rsqrt_dk",
    inputs=(
        *QKV,
        node_gate("p", "erase_key", "both", "feedback key, l2-normalised like k", "dk", heads="HK"),
        node_gate("g", "log_decay", "ready", "log-decay, at most 0"),
        node_gate("beta", "write_gate", "ready", "write gate"),
        node_gate("a", "log_decay", "raw", "g = -exp(A_log) softplus(a + dt_bias)"),
        node_gate("b", "write_gate", "raw", "beta = beta_scale sigmoid(b)"),
        parameter("A_log", "raw", "log of the decay rate of a head"),
        parameter("dt_bias", "raw", "bias of a"),
        option("beta_scale", "raw", 1.0, "factor of sigmoid(b)"),
    ),
    make_ready={"raw": _from_raw},
    erase_key=("p", "beta"),
    erase_write=("k",),
    write_value=("v", "beta"),
    normed=("q", "k", "p"),
    kernels=True,
    gate_formula="softplus_sigmoid",
)
