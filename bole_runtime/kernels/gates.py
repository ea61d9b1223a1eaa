"""What kernels read of a family's gates: names, in the order of their arguments, from the family's declaration."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from bole_runtime.families import get_family

#: Prefixes of strides that a gate would share.
_TAKEN = frozenset({"q", "k", "v", "o", "w", "s"})


def argument_name(gate: str) -> str:
    """Return what the pointer and strides of a gate are named after in kernels."""
    return f"{gate}_in" if gate in _TAKEN else gate.lower()


@dataclass(frozen=True)
class GateLayout:
    """The gates of a family in one mode, as its kernels take them.

    Attributes:
        nodes: gates of the call that have a value a node and value head.
        ready: what they become.
        parameters: values a head that gates are computed with, or that are the decay of the head.
        optional: those of ``parameters`` and ``skip`` that a call may leave out.
        skip: the parameter of the skip term, or empty.
        decay: the ready log-decay, or empty without one.
        decay_per_head: whether it has one value a head, whatever the node.
        decay_per_channel: whether it has one value a node and key channel.
        keeps_ready: whether a chain and a capture hold ready gates; otherwise those of the call.
        kept: what they hold.
        vectors: gates and parameters that have a value a key or value channel.
        value_vectors: those of them that have one a value channel.
        key_heads: gates that have a vector a key head.
        write: the ready write gate, or empty without one.
        erases: whether an update takes away what the state predicts.
        plain: whether it adds alone, or takes away along k what the decayed state has at k, as much as it writes.
        erase_row: what the erased part is read with: ``k``, or the ready gate that is a key of its own.
        erase_gate: the ready gate of key channels that multiplies it, or empty.
        erase_scale: the ready gate of one value that multiplies it, or empty.
        erase_sign: of what is erased.
        erase_write: the ready gate that it is taken away along, or empty for k.
        undecayed: whether it is read from the state before decay.
        formula: of the raw gates in the templates; empty in the ready mode.
        formula_options: floats that the formula takes.
        unit: the gate of the call that the formula takes divided by its length, or empty.
        options: floats of every mode, with their defaults: every kernel takes them.
    """

    nodes: tuple[str, ...]
    ready: tuple[str, ...]
    parameters: tuple[str, ...]
    optional: frozenset[str]
    skip: str
    decay: str
    decay_per_head: bool
    decay_per_channel: bool
    keeps_ready: bool
    kept: tuple[str, ...]
    vectors: frozenset[str]
    value_vectors: frozenset[str]
    key_heads: frozenset[str]
    write: str
    erases: bool
    plain: bool
    erase_row: str
    erase_gate: str
    erase_scale: str
    erase_sign: float
    erase_write: str
    undecayed: bool
    formula: str
    formula_options: tuple[str, ...]
    unit: str
    options: tuple[tuple[str, float], ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names in ``gates`` of what a commit reads."""
        return self.nodes + self.parameters

    @property
    def kept_strides(self) -> int:
        """Number of the strides of what a capture takes."""
        return 3 * len(self.kept) if not self.keeps_ready else 2 if self.kept else 0

    @property
    def verify_tensors(self) -> tuple[str, ...]:
        """Names in ``gates`` of what a verification reads."""
        return self.tensors + ((self.skip,) if self.skip else ())


@functools.lru_cache(maxsize=64)
def gate_layout(family: str, mode: str) -> GateLayout:
    """Return the layout of a family that has kernels."""
    spec = get_family(family)
    skip = next((i.name for i in spec.parameters(mode) if i.name in spec.skip), "")
    parameters = [i for i in spec.parameters(mode) if i.name != skip]
    nodes = tuple(i.name for i in spec.node_gates(mode))
    ready = tuple(i.name for i in spec.node_gates("ready"))
    gates = [i for m in (mode, "ready") for i in spec.gates(m)]
    options = {i.name: i.default for m in spec.modes for i in spec.options(m)}
    return GateLayout(
        nodes=nodes,
        ready=ready,
        parameters=tuple(i.name for i in parameters),
        optional=frozenset(i.name for i in spec.parameters(mode) if i.default is not None),
        skip=skip,
        decay=spec.log_decay.name if spec.log_decay is not None else "",
        decay_per_head=spec.decay == "head",
        decay_per_channel=spec.decay == "channel",
        keeps_ready=spec.keeps_ready,
        kept=ready if spec.keeps_ready else nodes,
        vectors=frozenset(i.name for i in gates if i.shape[-1:] in (("dk",), ("dv",))),
        value_vectors=frozenset(i.name for i in gates if i.shape[-1:] == ("dv",)),
        key_heads=frozenset(i.name for i in gates if "HK" in i.shape),
        write=next((i.name for i in spec.node_gates("ready") if i.role == "write_gate"), ""),
        erases=spec.erase != "none",
        plain=spec.plain,
        erase_row=spec.erase_key[0] if spec.erase_key else "",
        erase_gate=next((n for n in spec.erase_key[1:] if not spec.by_name[n].scalar), ""),
        erase_scale=next((n for n in spec.erase_key[1:] if spec.by_name[n].scalar), ""),
        erase_sign=spec.erase_sign,
        erase_write="" if spec.merged else spec.erase_write[0],
        undecayed=spec.erase == "undecayed",
        formula="" if mode == "ready" else spec.gate_formula,
        formula_options=tuple(i.name for i in spec.options(mode)),
        unit="" if mode == "ready" else spec.unit_gate,
        options=tuple((name, float(default or 0.0)) for name, default in options.items()),
    )
