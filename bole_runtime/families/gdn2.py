"""Gated DeltaNet 2: a decay per key channel, an erase gate per key channel, a write gate per value channel.

S_i = S_p diag(e^{g_i}) (I - (b_i o k_i) k_i^T) + (w_i o v_i) k_i^T,   o_i = S_i q_i     (b: ``erase``, w: ``write``)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.families.activations import softplus
from bole_runtime.families.shared import QKV, node_gate, option, parameter
from bole_runtime.families.spec import RecurrenceSpec


def _from_raw(gates: Mapping[str, torch.Tensor], options: Mapping[str, float]) -> dict[str, torch.Tensor]:
    f = gates["f"].double()
    bias = gates.get("dt_bias")
    if bias is not None:
        f = f + bias.double()
    return {
        "g": -gates["A_log"].double().exp().unsqueeze(-1) * softplus(f),
        "erase": options["erase_scale"] * torch.sigmoid(gates["b"].double()),
        "write": torch.sigmoid(gates["w"].double()),
    }


GDN2 = RecurrenceSpec(
    name="gdn2",
    title="Gated DeltaNet 2",
    decay="channel",
    erase="decayed",
    qk_l2norm=True,
    l2norm_eps=1e-6,
    scale="rsqrt_dk",
    inputs=(
        *QKV,
        node_gate("g", "log_decay", "ready", "log-decay of a key channel, at most 0", "dk"),
        node_gate("erase", "erase_gate", "ready", "erase gate of a key channel", "dk"),
        node_gate("write", "write_gate", "ready", "write gate of a value channel", "dv"),
        node_gate("f", "log_decay", "raw", "g = -exp(A_log) softplus(f + dt_bias)", "dk"),
        node_gate("b", "erase_gate", "raw", "erase = erase_scale sigmoid(b)", "dk"),
        node_gate("w", "write_gate", "raw", "write = sigmoid(w)", "dv"),
        parameter("A_log", "raw", "log of the decay rate of a head"),
        parameter("dt_bias", "raw", "bias of f", "dk", optional=True),
        option("erase_scale", "raw", 1.0, "factor of sigmoid(b); 2.0 allows negative eigenvalues"),
    ),
    make_ready={"raw": _from_raw},
    erase_key=("k", "erase"),
    erase_write=("k",),
    write_value=("v", "write"),
    kernels=True,
    gate_formula="channel_gates",
)
