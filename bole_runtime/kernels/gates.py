"""What kernels read of a family's gates: names, in the order of their arguments, from the family's declaration."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from bole_runtime.families import get_family


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
        vectors: gates and parameters that have a value a key channel.
        write: the ready write gate, or empty without one.
        erases: whether an update takes away what the state predicts.
        formula: of the raw gates in the templates; empty in the ready mode.
        formula_options: floats that the formula takes.
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
    write: str
    erases: bool
    formula: str
    formula_options: tuple[str, ...]
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
        vectors=frozenset(i.name for m in (mode, "ready") for i in spec.gates(m) if i.shape[-1:] == ("dk",)),
        write=next((i.name for i in spec.node_gates("ready") if i.role == "write_gate"), ""),
        erases=spec.erase != "none",
        formula="" if mode == "ready" else spec.gate_formula,
        formula_options=tuple(i.name for i in spec.options(mode)),
        options=tuple((name, float(default or 0.0)) for name, default in options.items()),
    )
