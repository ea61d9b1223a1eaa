"""Recurrence families as data: what a family takes, how its state decays and what an update erases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

#: How the committed state is scaled at each node: not at all, by a constant a head, by one gate a head, by one a key
#: channel.
Decay = Literal["none", "head", "scalar", "channel"]
#: What an update subtracts: nothing, what the decayed state predicts, what the state before decay predicts.
Erase = Literal["none", "decayed", "undecayed"]
Scale = Literal["rsqrt_dk", "one"]
#: ``both`` marks an input of every gate mode.
InputMode = Literal["both", "ready", "raw"]

#: Element types of q, k, v and of a state pool. float64 is for the torch and reference backends only.
DATA_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class InputSpec:
    """One input of a family.

    Attributes:
        name: name in the call (``q``) or in ``gates`` (``beta``).
        shape: symbolic dimensions. ``node`` stands for the leading dimensions of the tree, [B, N] or [T]; an empty
            shape is a Python float.
        dtypes: accepted element types.
        role: ``query``, ``key``, ``value``, ``log_decay``, ``write_gate``, ``parameter`` or ``option``.
        mode: gate mode that takes it.
        default: value when it is left out; None makes it required.
        doc: one line for people.
    """

    name: str
    shape: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    role: str
    mode: InputMode
    default: float | None
    doc: str


@dataclass(frozen=True)
class RecurrenceSpec:
    """A recurrence family of the form of DESIGN section 2.

    Attributes:
        name: identifier in tables and in ``verify(recurrence=...)``.
        title: name for people.
        decay: see :data:`Decay`.
        erase: see :data:`Erase`.
        qk_l2norm: whether q and k are l2-normalised by default, ``x / sqrt(sum x^2 + eps)``.
        l2norm_eps: eps, inside the root.
        scale: default factor of q, ``dk ** -0.5`` or 1.
        inputs: every input, q, k and v first.
        to_ready: turns the raw gates and parameters of a call into ready ones, in float64: ``to_ready(gates,
            beta_scale)``.
    """

    name: str
    title: str
    decay: Decay
    erase: Erase
    qk_l2norm: bool
    l2norm_eps: float
    scale: Scale
    inputs: tuple[InputSpec, ...]
    to_ready: Callable[[Mapping[str, torch.Tensor], float], dict[str, torch.Tensor]] = field(compare=False, repr=False)
    # Derived once: the hot path of verify() reads these. Gate modes, and the gate names each mode needs and may take.
    modes: tuple[str, ...] = field(init=False)
    required: Mapping[str, frozenset[str]] = field(init=False, compare=False, repr=False)
    allowed: Mapping[str, frozenset[str]] = field(init=False, compare=False, repr=False)
    _node_gates: Mapping[str, tuple[InputSpec, ...]] = field(init=False, compare=False, repr=False)
    _parameters: Mapping[str, tuple[InputSpec, ...]] = field(init=False, compare=False, repr=False)
    _options: Mapping[str, tuple[InputSpec, ...]] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        gates = [i for i in self.inputs if i.name not in ("q", "k", "v")]
        modes = tuple(dict.fromkeys(i.mode for i in gates if i.mode != "both"))

        def of(mode: str, want: Any) -> tuple[InputSpec, ...]:
            return tuple(i for i in gates if i.mode in (mode, "both") and want(i))

        set_ = object.__setattr__
        set_(self, "modes", modes)
        set_(self, "required", {m: frozenset(i.name for i in of(m, lambda i: i.default is None)) for m in modes})
        set_(self, "allowed", {m: frozenset(i.name for i in of(m, lambda i: True)) for m in modes})
        set_(self, "_node_gates", {m: of(m, lambda i: i.shape[:1] == ("node",)) for m in modes})
        set_(self, "_parameters", {m: of(m, lambda i: i.shape and i.shape[0] != "node") for m in modes})
        set_(self, "_options", {m: of(m, lambda i: not i.shape) for m in modes})

    def gates(self, mode: str) -> tuple[InputSpec, ...]:
        """Return everything that ``gates`` may hold in a mode."""
        return self._node_gates[mode] + self._parameters[mode] + self._options[mode]

    def node_gates(self, mode: str) -> tuple[InputSpec, ...]:
        """Return the gates given per node and head in a mode, e.g. ``g`` and ``beta``."""
        return self._node_gates[mode]

    def parameters(self, mode: str) -> tuple[InputSpec, ...]:
        """Return the per-head parameters of a mode, e.g. ``A_log`` and ``dt_bias``."""
        return self._parameters[mode]

    def options(self, mode: str) -> tuple[InputSpec, ...]:
        """Return the float options of a mode, e.g. ``beta_scale``."""
        return self._options[mode]

    def default_scale(self, dk: int) -> float:
        """Return the default factor of q."""
        return float(dk) ** -0.5 if self.scale == "rsqrt_dk" else 1.0
