"""RWKV-7, and the diagonal-plus-low-rank (DPLR) rule it is a case of: rank two, erased before decay.

S_i = S_p diag(e^{g_i}) + (S_p a_i) b_i^T + v_i k_i^T,   o_i = S_i q_i     (RWKV-7: a = -kk, b = kk o iclr)

The bonus of the current token and the group norm come after the recurrence and are the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from bole_runtime.families.shared import QKV, node_gate
from bole_runtime.families.spec import RecurrenceSpec

_RATE = -math.exp(-0.5)


def _from_raw(gates: Mapping[str, torch.Tensor], options: Mapping[str, float]) -> dict[str, torch.Tensor]:
    kk = gates["kk"].double()
    kk = kk / kk.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-12)
    return {
        "g": _RATE * torch.sigmoid(gates["w"].double()),
        "a": -kk,
        "b": kk * torch.sigmoid(gates["iclr"].double()),
    }


RWKV7 = RecurrenceSpec(
    name="rwkv7",
    title="RWKV-7, DPLR",
    decay="channel",
    erase="undecayed",
    qk_l2norm=False,
    l2norm_eps=1e-6,
    scale="one",
    inputs=(
        *QKV,
        node_gate("g", "log_decay", "ready", "log-decay of a key channel, at most 0", "dk"),
        node_gate("a", "erase_key", "ready", "reads what is added along b; -kk in RWKV-7", "dk"),
        node_gate("b", "erase_write", "ready", "where it is added; kk o iclr in RWKV-7", "dk"),
        node_gate("w", "log_decay", "raw", "g = -e^-0.5 sigmoid(w)", "dk"),
        node_gate("kk", "erase_key", "raw", "removal key before its l2 norm (k o k_k)", "dk"),
        node_gate("iclr", "erase_gate", "raw", "in-context learning rate before its sigmoid", "dk"),
    ),
    make_ready={"raw": _from_raw},
    erase_key=("a",),
    erase_write=("b",),
    erase_sign=1.0,
    kernels=True,
    gate_formula="unit_key",
    unit_gate="kk",
)
