"""Mamba2 layers of SGLang (Nemotron-H, Falcon-H1, Granite 4): verification of trees and chains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bole_runtime.integrations.engine_rounds import EnginePools
from bole_runtime.integrations.sglang.memory import pools_of
from bole_runtime.integrations.sglang.rounds import layer_round
from bole_runtime.state.geometry import LayerGeometry

_RATES = "_bole_rates"


def forward(
    original: Callable[..., Any],
    backend: Any,
    mixer: Any,
    hidden_states: torch.Tensor,
    output: torch.Tensor | None,
    layer_id: int,
    forward_batch: Any,
    mup_vector: torch.Tensor | None = None,
    **more: Any,
) -> Any:
    """Around ``Mamba2AttnBackend.forward``: a target verification is Bole's, everything else is as it was.

    The whole mixer runs here, since its convolution and its recurrence are lines of one function
    (``srt/layers/attention/mamba/mamba.py``): the projections and the gated norm are the mixer's own.

    Returns:
        The mixer's output, which is also written to ``output``.
    """
    if not forward_batch.forward_mode.is_target_verify():
        return original(
            backend, mixer, hidden_states, output, layer_id, forward_batch, mup_vector=mup_vector, **more
        )  # fmt: skip
    share = mixer.tp_size
    inner, heads = mixer.intermediate_size // share, mixer.num_heads // share
    groups, size, width = mixer.n_groups // share, mixer.ssm_state_size, mixer.conv1d.weight.shape[-1]

    def describe() -> tuple[LayerGeometry, EnginePools]:
        states, conv = pools_of(backend.req_to_token_pool)
        geometry = LayerGeometry(
            key_heads=groups, value_heads=heads, dk=size, dv=mixer.head_dim, recurrence="mamba2", gate_mode="raw",
            conv_width=width,
        )  # fmt: skip
        return geometry, EnginePools(states, conv)

    projected, _ = mixer.in_proj(hidden_states)
    if mup_vector is not None:
        projected = projected * mup_vector
    gate, raw, dt = projected.split((inner, mixer.conv_dim // share, heads), dim=-1)
    rows, nodes = backend.forward_metadata.num_decodes, forward_batch.spec_info.draft_token_num
    number, current, slots = layer_round(backend, layer_id, forward_batch.spec_info, rows, projected.dtype, describe)
    raw, dt = (t[: rows * nodes].unflatten(0, (rows, nodes)) for t in (raw, dt))
    weight = mixer.conv1d.weight.view(-1, width)
    mixed = current.conv(number, raw, weight, mixer.conv1d.bias, slots, mixer.activation)
    x, b, c = mixed.split((inner, groups * size, groups * size), dim=-1)
    # No limits of dt: SGLang's decoding has none, and its prefill (0, inf), whatever the model's config says.
    gates = {"dt_raw": dt, "A_log": _log_rate(backend, number, mixer), "dt_bias": mixer.dt_bias, "D": mixer.D}
    out = current.verify(
        number,
        c.unflatten(-1, (groups, size)),
        b.unflatten(-1, (groups, size)),
        x.unflatten(-1, (heads, mixer.head_dim)),
        gates,
        slots,
    )
    out = out.flatten(2).flatten(0, 1).to(hidden_states.dtype)  # a wider mup_vector widens what it multiplies
    if out.shape[0] < projected.shape[0]:  # tokens that only fill the batch up
        out = torch.nn.functional.pad(out, (0, 0, 0, projected.shape[0] - out.shape[0]))
    result, _ = mixer.out_proj(mixer.norm(out, gate))
    if output is not None:
        output[: result.shape[0]].copy_(result)
    return result


class _Rates:
    """A_log of all layers, of which SGLang keeps A = -exp(A_log).

    Made anew in every forward, since weights may be replaced in place, and by the first layer for all of them: three
    launches instead of two a layer. Only the first forward meets layers that are not known yet.
    """

    def __init__(self) -> None:
        self._mixers: dict[int, Any] = {}
        self._logs: tuple[torch.Tensor, ...] = ()

    def of(self, number: int, mixer: Any) -> torch.Tensor:
        if number == 0 and self._mixers:
            known = [self._mixers[n].A.detach() for n in range(len(self._mixers))]
            self._logs = torch.stack(known).neg_().log_().unbind()
        self._mixers[number] = mixer
        return self._logs[number] if number < len(self._logs) else mixer.A.detach().neg().log_()


def _log_rate(backend: Any, number: int, mixer: Any) -> torch.Tensor:
    rates: _Rates | None = getattr(backend, _RATES, None)
    if rates is None:
        rates = _Rates()
        setattr(backend, _RATES, rates)
    return rates.of(number, mixer)
