"""Arguments of the generated kernels, declared once.

The renderer prints them, the launcher and the offline compiler fill them.

Every verify kernel takes the same list, whatever it uses of it, so that one call prepares its arguments once
for all of its launches.
"""

from __future__ import annotations

from dataclasses import dataclass

from bole_runtime.kernels.gates import GateLayout, argument_name, gate_layout
from bole_runtime.kernels.problem import Problem

_TRITON_TYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}


@dataclass(frozen=True)
class Argument:
    """One kernel argument.

    Attributes:
        name: as in the rendered signature.
        kind: ``in``, ``state``, ``gate``, ``f32``, ``i32``, ``index`` for pointers (the element type), ``scratch``
            for fp32 buffers of the runtime's own, ``int`` and ``float`` for scalars, ``stride`` for strides.
        optional: a pointer that is None in the usual call.
        aligned: a stride that is a multiple of 16 elements in the usual call, or a pointer to a gate that is one of
            16 bytes and read as wide as q, k and v are.
        unit: a stride that is 1 in the usual call.
    """

    name: str
    kind: str
    optional: bool = False
    aligned: bool = False
    unit: bool = False

    @property
    def specialised(self) -> bool:
        """Whether Triton may compile anew for values that are multiples of 16 (it also would for the value 1).

        Only what decides the width of a load is: everything else would only multiply compilations.
        """
        if self.kind == "stride":
            return self.aligned or self.unit
        return self.aligned or self.kind in ("in", "state", "scratch")


def _pointers(kind: str, *names: str, optional: bool = False) -> tuple[Argument, ...]:
    return tuple(Argument(n, kind, optional) for n in names)


def _strides(prefix: str, dims: str, aligned: bool = True) -> tuple[Argument, ...]:
    return tuple(Argument(f"stride_{prefix}{d}", "stride", aligned=aligned) for d in dims)


def _pointer(name: str) -> str:
    return f"{argument_name(name)}_ptr"


def _layout(problem: Problem) -> GateLayout:
    return gate_layout(problem.family, problem.gate_mode)


def _gates(problem: Problem, names: tuple[str, ...]) -> tuple[Argument, ...]:
    layout = _layout(problem)
    return tuple(Argument(_pointer(n), "gate", n in layout.optional, n in layout.vectors) for n in names)


def _gate_strides(problem: Problem) -> tuple[Argument, ...]:
    layout = _layout(problem)
    vectors = (n for n in layout.parameters if n in layout.vectors)
    return (
        *(s for n in layout.nodes for s in _strides(argument_name(n), "bnh", aligned=n in layout.vectors)),
        *(s for n in vectors for s in _strides(argument_name(n), "h")),
    )


def _kept(problem: Problem, prefix: str, optional: bool = False) -> tuple[Argument, ...]:
    """Gates in buffers of Bole's own."""
    layout = _layout(problem)
    if layout.keeps_ready:
        return _pointers("f32", *(f"{prefix}{name}_ptr" for name in layout.kept), optional=optional)
    return tuple(Argument(f"{prefix}{_pointer(n)}", "gate", optional, n in layout.vectors) for n in layout.kept)


def _kept_strides(problem: Problem, prefix: str, dims: str) -> tuple[Argument, ...]:
    """Their strides: ready gates have one layout, the others each its own."""
    layout = _layout(problem)
    if layout.keeps_ready:
        return _strides(f"{prefix}g", dims, aligned=False) if layout.kept else ()
    each = ((f"{prefix}{argument_name(name)}", name in layout.vectors) for name in layout.kept)
    return tuple(s for name, vector in each for s in _strides(name, f"{dims}h", aligned=vector))


def _options(problem: Problem) -> tuple[Argument, ...]:
    return tuple(Argument(name, "float") for name, _ in _layout(problem).options)


def _pending(problem: Problem) -> tuple[Argument, ...]:
    if not problem.pending:
        return ()
    return (
        *_pointers("in", "pk_ptr", "pv_ptr"),
        *_kept(problem, "p"),
        *_pointers("i32", "plength_ptr", "pstart_ptr"),
        Argument("pcapacity", "int"),
        *_strides("pk", "snh"),
        *_strides("pv", "snh"),
        *_kept_strides(problem, "p", "sn"),
    )


def captured_names(problem: Problem) -> frozenset[str]:
    """Names of the buffers that a verify captures factors in; a commit has none."""
    if problem.op != "verify":
        return frozenset()
    return frozenset({"ck_ptr", "cv_ptr", *(a.name for a in _kept(problem, "c"))})


def verify_arguments(problem: Problem) -> tuple[Argument, ...]:
    """Arguments of every verify kernel of a problem, in order."""
    layout = _layout(problem)
    return (
        *_pointers("in", "q_ptr", "k_ptr", "v_ptr"),
        *_gates(problem, layout.verify_tensors),
        *_pointers("state", "state_ptr"),
        *_pointers("index", "slots_ptr"),
        *_pointers("i32", "words_ptr"),
        *_pointers("i32", "offsets_ptr", optional=True),
        *_pointers("i32", "depths_ptr"),
        *_pointers("in", "out_ptr"),
        *_pointers("in", "ck_ptr", "cv_ptr", optional=True),
        *_kept(problem, "c", optional=True),
        *_pointers("scratch", "work_ptr", "weights_ptr", optional=True),
        *_pending(problem),
        Argument("nodes", "int"),
        Argument("heads", "int"),
        Argument("batch", "int"),
        Argument("slot_count", "int"),
        Argument("scale", "float"),
        *_options(problem),
        *_strides("q", "bnh"),
        *_strides("k", "bnh"),
        *_strides("v", "bnh"),
        *_gate_strides(problem),
        *_strides("o", "bnh"),
        *_strides("w", "bn", aligned=False),
        *_strides("s", "shr"),
        *_strides("ck", "bn"),
        *_strides("cv", "bn"),
        *_kept_strides(problem, "c", "bn"),
    )


def commit_pointers(problem: Problem) -> tuple[Argument, ...]:
    """Pointers of a commit that differ from layer to layer: a row of the layer table, or arguments for one layer."""
    return (
        *_pointers("state", "state_ptr"),
        *_pointers("in", "k_ptr", "v_ptr"),
        *_gates(problem, _layout(problem).tensors),
        *(a for a in _pending(problem) if a.kind in ("in", "f32", "i32", "gate")),
    )


def commit_arguments(problem: Problem, table: bool) -> tuple[Argument, ...]:
    """Arguments of a commit kernel, in order; with ``table`` the layers' pointers come from device memory."""
    return (
        *((Argument("layers_ptr", "table"),) if table else commit_pointers(problem)),
        *_pointers("index", "slots_ptr", "accepted_ptr"),
        *(_pointers("i32", "actions_ptr", optional=True) if problem.pending else ()),
        *_pointers("i32", "words_ptr"),
        *_pointers("i32", "offsets_ptr", optional=True),
        *(a for a in _pending(problem) if a.kind in ("int", "stride")),
        Argument("nodes", "int"),
        Argument("heads", "int"),
        Argument("slot_count", "int"),
        Argument("batch", "int"),
        *_options(problem),
        *_strides("k", "bnh"),
        *_strides("v", "bnh"),
        *_gate_strides(problem),
        *_strides("w", "bn", aligned=False),
        *_strides("s", "shr"),
    )


def gate_tensors(problem: Problem) -> tuple[str, ...]:
    """Pointers to gates of an operation, in the order of its arguments and of ``gate_dtypes``."""
    verify, layout = problem.op == "verify", _layout(problem)
    kept: tuple[Argument, ...] = () if layout.keeps_ready or not problem.pending else _kept(problem, "p")
    if verify and not layout.keeps_ready:
        kept = (*kept, *_kept(problem, "c"))
    return (*(_pointer(n) for n in (layout.verify_tensors if verify else layout.tensors)), *(a.name for a in kept))


def usual_gate_dtypes(problem: Problem) -> tuple[str, ...]:
    """Element types of the gate inputs of a usual call, in the order of the family's spec."""
    layout = _layout(problem)
    nodes = "bf16" if problem.gate_mode == "raw" else "fp32"
    given = len(layout.verify_tensors if problem.op == "verify" else layout.tensors)
    kept = (nodes,) * (len(gate_tensors(problem)) - given)
    return (nodes,) * len(layout.nodes) + ("fp32",) * (given - len(layout.nodes)) + kept
