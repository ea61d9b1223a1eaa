"""Gated DeltaNet: scalar decay, delta rule on the decayed state.

S_i = e^{g_i} S_p + u_i k_i^T,   u_i = beta_i (v_i - e^{g_i} S_p k_i),   o_i = S_i q_i
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bole_runtime.families.spec import DATA_DTYPES, InputSpec, RecurrenceSpec

_GATE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _to_ready(gates: Mapping[str, torch.Tensor], beta_scale: float) -> dict[str, torch.Tensor]:
    """Return g and beta in float64 from a, b, A_log and dt_bias."""
    x = gates["a"].double() + gates["dt_bias"].double()
    # Stable without a threshold: log(1 + e^x) = max(x, 0) + log1p(e^-|x|).
    softplus = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    return {
        "g": -torch.exp(gates["A_log"].double()) * softplus,
        "beta": beta_scale * torch.sigmoid(gates["b"].double()),
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
        InputSpec("q", ("node", "HK", "dk"), DATA_DTYPES, "query", "both", None, "queries"),
        InputSpec("k", ("node", "HK", "dk"), DATA_DTYPES, "key", "both", None, "keys"),
        InputSpec("v", ("node", "HV", "dv"), DATA_DTYPES, "value", "both", None, "values"),
        InputSpec("g", ("node", "HV"), _GATE, "log_decay", "ready", None, "log-decay, at most 0"),
        InputSpec("beta", ("node", "HV"), _GATE, "write_gate", "ready", None, "write gate"),
        InputSpec("a", ("node", "HV"), _GATE, "log_decay", "raw", None, "g = -exp(A_log) softplus(a + dt_bias)"),
        InputSpec("b", ("node", "HV"), _GATE, "write_gate", "raw", None, "beta = beta_scale sigmoid(b)"),
        InputSpec("A_log", ("HV",), _GATE, "parameter", "raw", None, "log of the decay rate of a head"),
        InputSpec("dt_bias", ("HV",), _GATE, "parameter", "raw", None, "bias of a"),
        InputSpec("beta_scale", (), (), "option", "raw", 1.0, "factor of sigmoid(b); 2.0 allows negative eigenvalues"),
    ),
    to_ready=_to_ready,
)
