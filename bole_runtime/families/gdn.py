"""Gated DeltaNet: scalar decay, delta rule on the decayed state.

S_i = e^{g_i} S_p + u_i k_i^T,   u_i = beta_i (v_i - e^{g_i} S_p k_i),   o_i = S_i q_i
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.families.activations import softplus
from bole_runtime.families.shared import QKV, node_gate, option, parameter
from bole_runtime.families.spec import RecurrenceSpec


def _from_raw(gates: Mapping[str, torch.Tensor], options: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """Return g and beta in float64 from a, b, A_log and dt_bias."""
    rate = torch.exp(gates["A_log"].double())
    return {
        "g": -rate * softplus(gates["a"].double() + gates["dt_bias"].double()),
        "beta": options["beta_scale"] * torch.sigmoid(gates["b"].double()),
    }


GDN = RecurrenceSpec(
    name="gdn",
    title="Gated DeltaNet",
    decay="scalar",
    erase="decayed",
    qk_l2norm=True,
    l2norm_eps=1e-6,
    scale="rsqrt_dk",
    inputs=(
        *QKV,
        node_gate("g", "log_decay", "ready", "log-decay, at most 0"),
        node_gate("beta", "write_gate", "ready", "write gate"),
        node_gate("a", "log_decay", "raw", "g = -exp(A_log) softplus(a + dt_bias)"),
        node_gate("b", "write_gate", "raw", "beta = beta_scale sigmoid(b)"),
        parameter("A_log", "raw", "log of the decay rate of a head"),
        parameter("dt_bias", "raw", "bias of a"),
        option("beta_scale", "raw", 1.0, "factor of sigmoid(b); 2.0 allows negative eigenvalues"),
    ),
    make_ready={"raw": _from_raw},
    erase_key=("k", "beta"),
    erase_write=("k",),
    write_key=("k",),
    write_value=("v", "beta"),
    kernels=True,
    gate_formula="softplus_sigmoid",
)
