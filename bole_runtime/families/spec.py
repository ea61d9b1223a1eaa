"""Recurrence families as data: what a family takes, how its state decays, what an update erases and writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from bole_runtime.families.declaration import check_declaration

#: How the committed state is scaled at each node: not at all, by a constant a head, by one gate a head, by one a key
#: channel.
Decay = Literal["none", "head", "scalar", "channel"]
#: What an update subtracts: nothing, what the decayed state predicts, what the state before decay predicts.
Erase = Literal["none", "decayed", "undecayed"]
#: Which state a node reads: its own, or that of its parent, before decay and update.
Output = Literal["after", "before"]
Scale = Literal["rsqrt_dk", "one"]
#: Names of inputs that are multiplied, broadcast over dimensions that one of them lacks.
Product = tuple[str, ...]
#: ``make_ready(tensors, options)`` returns the ready gates of a mode in float64.
MakeReady = Callable[[Mapping[str, torch.Tensor], Mapping[str, float]], dict[str, torch.Tensor]]

#: Element types of q, k, v and of a state pool. float64 is for the torch and reference backends only.
DATA_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
#: Element types of everything else that is given per node or per head.
GATE_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class InputSpec:
    """One input of a family.

    Attributes:
        name: name in the call (``q``) or in ``gates`` (``beta``).
        shape: symbolic dimensions. ``node`` stands for the leading dimensions of the tree, [B, N] or [T], then
            ``HK`` or ``HV``, then ``dk`` or ``dv`` for a vector. Without ``node``: a parameter a head. Empty: a
            Python float.
        dtypes: accepted element types; empty for a float.
        role: ``query``, ``key``, ``value``, ``log_decay`` (the ready one is the decay; raw inputs may have the role
            too), ``write_gate``, ``erase_gate``, ``erase_key``, ``erase_write``, ``parameter`` or ``option``.
        mode: gate mode that takes it, or ``both`` for every one.
        default: value of a float that is left out. Any number makes a parameter optional. None makes it required.
        doc: one line for people.
        limits: of a float, both allowed.
    """

    name: str
    shape: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    role: str
    mode: str
    default: float | None
    doc: str
    limits: tuple[float, float] = (-math.inf, math.inf)
    #: Whether it is one value a node and value head, the usual gate; and one value a value head, the usual parameter.
    scalar: bool = field(init=False, repr=False, compare=False)
    per_head: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scalar", self.shape == ("node", "HV"))
        object.__setattr__(self, "per_head", self.shape == ("HV",))

    def sizes(self, heads: tuple[int, int], dims: tuple[int, int]) -> tuple[int, ...]:
        """Return its dimensions after ``node`` for (HK, HV) and (dk, dv)."""
        known = {"HK": heads[0], "HV": heads[1], "dk": dims[0], "dv": dims[1]}
        return tuple(known[d] for d in self.shape if d != "node")


@dataclass(frozen=True)
class RecurrenceSpec:
    """A recurrence family, per value head, with S_p the state of the parent:

        S_i = D_i o S_p + e_i b_i^T + r_i w_i^T        e_i = -(D'_i o S_p) f_i        o_i = S_i q_i + skip

    Validation, factors, the torch closed form, the renderer and the docs read this declaration.

    Attributes:
        name: identifier in tables and in ``verify(recurrence=...)``.
        title: name for people.
        decay: see :data:`Decay`. D_i is e to the ready input of role ``log_decay``.
        erase: see :data:`Erase`.
        qk_l2norm: whether ``normed`` inputs are l2-normalised by default, ``x / sqrt(sum x^2 + eps)``.
        l2norm_eps: eps, inside the root.
        scale: default factor of q, ``dk ** -0.5`` or 1.
        inputs: every input, q, k and v first.
        make_ready: for each raw gate mode, the function that turns its tensors and floats into the ready gates.
        erase_key: f, a product of inputs.
        erase_write: b, a product. Equal to ``write_key`` for a delta rule: both updates are then one, of rank one.
        erase_sign: -1.0, or +1.0 where the published f has the other sign.
        write_key: w, a product.
        write_value: r, a product.
        skip: a product that is added to the output; empty for none. Left out of a call that lacks an optional factor.
        output: see :data:`Output`.
        normed: the inputs that ``qk_l2norm`` is about.
        kernels: whether Triton kernels exist; the triton backend leaves other families to the torch backend, or
            refuses them when it was asked for by name. So it does with sizes that no variant takes: those of a decay a
            key channel are limited.
        gate_formula: how the templates compute ready gates from raw ones (parts/gates.jinja), for a family with
            kernels and raw gates.
        unit_gate: the raw gate that the formula takes divided by its length.
    """

    name: str
    title: str
    decay: Decay
    erase: Erase
    qk_l2norm: bool
    l2norm_eps: float
    scale: Scale
    inputs: tuple[InputSpec, ...]
    make_ready: Mapping[str, MakeReady] = field(default_factory=dict, compare=False, repr=False)
    erase_key: Product = ()
    erase_write: Product = ()
    erase_sign: float = -1.0
    write_key: Product = ("k",)
    write_value: Product = ("v",)
    skip: Product = ()
    output: Output = "after"
    normed: tuple[str, ...] = ("q", "k")
    kernels: bool = False
    gate_formula: str = ""
    unit_gate: str = ""
    # Derived once: the hot path of verify() reads these. Gate modes, and the gate names each mode needs and may take.
    modes: tuple[str, ...] = field(init=False)
    #: Whether factors and pending chains hold ready gates (a value a head) or the gates of the call, which are
    #: smaller where gates are vectors.
    keeps_ready: bool = field(init=False)
    #: Whether an update only adds, or takes away along k what the decayed state has at k, as much as it writes.
    plain: bool = field(init=False)
    #: The ready input that decays the state, or None.
    log_decay: InputSpec | None = field(init=False, compare=False, repr=False)
    by_name: Mapping[str, InputSpec] = field(init=False, compare=False, repr=False)
    required: Mapping[str, frozenset[str]] = field(init=False, compare=False, repr=False)
    allowed: Mapping[str, frozenset[str]] = field(init=False, compare=False, repr=False)
    _node_gates: Mapping[str, tuple[InputSpec, ...]] = field(init=False, compare=False, repr=False)
    _parameters: Mapping[str, tuple[InputSpec, ...]] = field(init=False, compare=False, repr=False)
    _options: Mapping[str, tuple[InputSpec, ...]] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        gates = [i for i in self.inputs if i.name not in ("q", "k", "v")]
        modes = tuple(dict.fromkeys(("ready", *(i.mode for i in gates if i.mode != "both"))))
        of = {m: tuple(i for i in gates if i.mode in (m, "both")) for m in modes}
        decays = [i for i in of["ready"] if i.role == "log_decay"]
        set_ = object.__setattr__
        set_(self, "modes", modes)
        set_(self, "by_name", {i.name: i for i in self.inputs})
        set_(self, "required", {m: frozenset(i.name for i in of[m] if i.default is None) for m in modes})
        set_(self, "allowed", {m: frozenset(i.name for i in of[m]) for m in modes})
        set_(self, "_node_gates", {m: tuple(i for i in of[m] if i.shape[:1] == ("node",)) for m in modes})
        set_(self, "_parameters", {m: tuple(i for i in of[m] if i.shape and i.shape[0] != "node") for m in modes})
        set_(self, "_options", {m: tuple(i for i in of[m] if not i.shape) for m in modes})
        set_(self, "log_decay", decays[0] if decays else None)
        set_(self, "keeps_ready", all(i.scalar for i in self._node_gates["ready"]))
        delta = self.erase == "decayed" and self.merged and self.erase_key == ("k", *self.write_value[1:])
        scalars = all(self.by_name[n].shape[-1:] == ("HV",) for n in self.write_value[1:] if n in self.by_name)
        set_(self, "plain", (self.erase == "none" or delta) and scalars)
        check_declaration(self)

    def __reduce__(self) -> str | tuple[object, ...]:
        """A copy of a family of the registry, also in another process, is the one that is there."""
        from bole_runtime.families import FAMILIES, get_family

        return (get_family, (self.name,)) if FAMILIES.get(self.name) is self else super().__reduce__()

    def gates(self, mode: str) -> tuple[InputSpec, ...]:
        """Return everything that ``gates`` may hold in a mode."""
        return self._node_gates[mode] + self._parameters[mode] + self._options[mode]

    def node_gates(self, mode: str) -> tuple[InputSpec, ...]:
        """Return the gates given per node in a mode, e.g. ``g`` and ``beta``."""
        return self._node_gates[mode]

    def parameters(self, mode: str) -> tuple[InputSpec, ...]:
        """Return the per-head parameters of a mode, e.g. ``A_log`` and ``dt_bias``."""
        return self._parameters[mode]

    def options(self, mode: str) -> tuple[InputSpec, ...]:
        """Return the float options of a mode, e.g. ``beta_scale``."""
        return self._options[mode]

    def mode_of(self, names: Mapping[str, object]) -> str | None:
        """Return the gate mode that a call with these names in ``gates`` has, or None."""
        for mode in self.modes:
            if self.required[mode] <= names.keys() <= self.allowed[mode]:
                return mode
        return None

    def kept_mode(self, mode: str) -> str:
        """Return the gate mode of capture buffers and pending chains of calls in ``mode``."""
        return "ready" if self.keeps_ready else mode

    @property
    def merged(self) -> bool:
        """Whether erased and written parts have one key, so that an update has rank one."""
        return self.erase == "none" or self.erase_write == self.write_key

    def default_scale(self, dk: int) -> float:
        """Return the default factor of q."""
        return float(dk) ** -0.5 if self.scale == "rsqrt_dk" else 1.0
