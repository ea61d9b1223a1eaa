"""From a call of ``verify`` to its factors: its own tensors, or copies of them in buffers of the caller."""

from __future__ import annotations

from bole_runtime.calls import VerifyCall
from bole_runtime.factors import NO_OPTIONS, Factors, kept_gates, parameters_of


def factors_of(call: VerifyCall) -> Factors:
    """Return the factors of a call: its own tensors, or its capture buffers once a backend has filled them."""
    capture, spec = call.capture, call.spec
    if capture is None:
        return Factors(
            spec, call.gate_mode, call.k, call.v, call.gates, call.beta_scale, call.qk_l2norm, call.tree, call.pending,
            call.options,
        )  # fmt: skip
    mode, gates = capture.gate_mode, capture.gates
    if spec.parameters(mode):
        gates = {**gates, **parameters_of(spec, mode, call.gates)}
    scale, options = (call.beta_scale, call.options) if mode == call.gate_mode else (1.0, NO_OPTIONS)
    return Factors(spec, mode, capture.k, capture.v, gates, scale, call.qk_l2norm, call.tree, call.pending, options)


def capture_eager(call: VerifyCall) -> None:
    """Fill the capture buffers of a call with torch operations, for backends without a fused capture."""
    capture, spec = call.capture, call.spec
    if capture is None:
        return
    capture.k.copy_(call.k)
    capture.v.copy_(call.v)
    gates = kept_gates(spec, call.gates, call.gate_mode, call.beta_scale, call.options)
    for name, buffer in capture.gates.items():
        buffer.copy_(gates[name])
