"""DeltaNet: no decay, delta rule.

S_i = S_p + u_i k_i^T,   u_i = beta_i (v_i - S_p k_i),   o_i = S_i q_i
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.families.shared import QKV, node_gate, option
from bole_runtime.families.spec import RecurrenceSpec


def _from_raw(gates: Mapping[str, torch.Tensor], options: Mapping[str, float]) -> dict[str, torch.Tensor]:
    return {"beta": options["beta_scale"] * torch.sigmoid(gates["b"].double())}


DELTANET = RecurrenceSpec(
    name="deltanet",
    title="DeltaNet",
    decay="none",
    erase="decayed",
    qk_l2norm=True,
    l2norm_eps=1e-6,
    scale="rsqrt_dk",
    inputs=(
        *QKV,
        node_gate("beta", "write_gate", "ready", "write gate"),
        node_gate("b", "write_gate", "raw", "beta = beta_scale sigmoid(b)"),
        option("beta_scale", "raw", 1.0, "factor of sigmoid(b); 2.0 allows negative eigenvalues"),
    ),
    make_ready={"raw": _from_raw},
    erase_key=("k", "beta"),
    erase_write=("k",),
    write_value=("v", "beta"),
    kernels=True,
    gate_formula="sigmoid",
)
