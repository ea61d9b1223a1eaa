"""Arguments of the generated kernels, declared once.

The renderer prints them, the launcher and the offline compiler fill them.

Every verify kernel takes the same list, whatever it uses of it, so that one call prepares its arguments once
for all of its launches.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        aligned: a stride that is a multiple of 16 elements in the usual call.
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
        return self.kind in ("in", "state", "scratch")


def _pointers(kind: str, *names: str, optional: bool = False) -> tuple[Argument, ...]:
    return tuple(Argument(n, kind, optional) for n in names)


def _strides(prefix: str, dims: str, aligned: bool = True) -> tuple[Argument, ...]:
    return tuple(Argument(f"stride_{prefix}{d}", "stride", aligned=aligned) for d in dims)


def gate_names(problem: Problem) -> tuple[str, str]:
    """Names of the two gate inputs that have a value per node and value head."""
    return ("a", "b") if problem.gate_mode == "raw" else ("g", "beta")


def _gates(problem: Problem) -> tuple[Argument, ...]:
    first, second = gate_names(problem)
    extra = _pointers("gate", "a_log_ptr", "dt_bias_ptr") if problem.gate_mode == "raw" else ()
    return _pointers("gate", f"{first}_ptr", f"{second}_ptr") + extra


def _pending(problem: Problem) -> tuple[Argument, ...]:
    if not problem.pending:
        return ()
    return (
        *_pointers("in", "pk_ptr", "pv_ptr"),
        *_pointers("f32", "pg_ptr", "pbeta_ptr"),
        *_pointers("i32", "plength_ptr", "pstart_ptr"),
        Argument("pcapacity", "int"),
        *_strides("pk", "snh"),
        *_strides("pv", "snh"),
        *_strides("pg", "sn", aligned=False),
    )


def verify_arguments(problem: Problem) -> tuple[Argument, ...]:
    """Arguments of every verify kernel of a problem, in order."""
    first, second = gate_names(problem)
    return (
        *_pointers("in", "q_ptr", "k_ptr", "v_ptr"),
        *_gates(problem),
        *_pointers("state", "state_ptr"),
        *_pointers("index", "slots_ptr"),
        *_pointers("i32", "words_ptr"),
        *_pointers("i32", "offsets_ptr", optional=True),
        *_pointers("i32", "depths_ptr"),
        *_pointers("in", "out_ptr"),
        *_pointers("in", "ck_ptr", "cv_ptr", optional=True),
        *_pointers("f32", "cg_ptr", "cbeta_ptr", optional=True),
        *_pointers("scratch", "work_ptr", "weights_ptr", optional=True),
        *_pending(problem),
        Argument("nodes", "int"),
        Argument("heads", "int"),
        Argument("batch", "int"),
        Argument("slot_count", "int"),
        Argument("scale", "float"),
        Argument("beta_scale", "float"),
        *_strides("q", "bnh"),
        *_strides("k", "bnh"),
        *_strides("v", "bnh"),
        *_strides(first, "bnh", aligned=False),
        *_strides(second, "bnh", aligned=False),
        *_strides("o", "bnh"),
        *_strides("w", "bn", aligned=False),
        *_strides("s", "shr"),
        *_strides("ck", "bn"),
        *_strides("cv", "bn"),
        *_strides("cg", "bn", aligned=False),
    )


def commit_pointers(problem: Problem) -> tuple[Argument, ...]:
    """Pointers of a commit that differ from layer to layer: a row of the layer table, or arguments for one layer."""
    return (
        *_pointers("state", "state_ptr"),
        *_pointers("in", "k_ptr", "v_ptr"),
        *_gates(problem),
        *(a for a in _pending(problem) if a.kind in ("in", "f32", "i32")),
    )


def commit_arguments(problem: Problem, table: bool) -> tuple[Argument, ...]:
    """Arguments of a commit kernel, in order; with ``table`` the layers' pointers come from device memory."""
    first, second = gate_names(problem)
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
        Argument("beta_scale", "float"),
        *_strides("k", "bnh"),
        *_strides("v", "bnh"),
        *_strides(first, "bnh", aligned=False),
        *_strides(second, "bnh", aligned=False),
        *_strides("w", "bn", aligned=False),
        *_strides("s", "shr"),
    )


def usual_gate_dtypes(problem: Problem) -> tuple[str, ...]:
    """Element types of the gate inputs of a usual call, in the order of the family's spec."""
    return ("bf16", "bf16", "fp32", "fp32") if problem.gate_mode == "raw" else ("fp32", "fp32")
