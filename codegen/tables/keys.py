"""From a table key or a bucket's name back to the problem."""

from __future__ import annotations

from collections.abc import Iterable

from bole_codegen.search.targets import MAX_SIZE
from bole_codegen.tables.conv_keys import CONV_EXAMPLE, parse_conv
from bole_codegen.tables.key_parts import NUMBER, WORD, Form, KeyFault, Part, first_word, plain, read_parts
from bole_runtime.families import FAMILIES
from bole_runtime.kernels.conv_problem import CONV_OPS
from bole_runtime.kernels.problem import (
    DEPTH_BUCKETS,
    DTYPES,
    OPS,
    PRECISIONS,
    Problem,
    Specialisation,
    bucket,
    row_buckets,
    work_bucket,
)

_OP = Part("an operation", rf"(?P<op>{WORD})", "verify")
_FAMILY = Part("a family", rf"(?P<family>{WORD})", "gdn")
_GATES = Part("raw or ready gates", rf"(?P<gate_mode>{WORD})", "raw")
_PRECISION = Part("a precision", rf"(?P<precision>{WORD})", "fast")
_HEADS = rf"dk(?P<dk>{NUMBER})-dv(?P<dv>{NUMBER})-g(?P<group>{NUMBER})"
_ROWS = rf"n(?P<nodes>{NUMBER})-d(?P<depth>{NUMBER})-p(?P<pending>{NUMBER})-w(?P<work>{NUMBER})"
_KEY = Form(
    "/",
    (
        _OP,
        _FAMILY,
        Part("dk, dv and HV/HK", _HEADS, "dk128-dv128-g2"),
        Part("the types of q, k, v and of the state", rf"(?P<in_dtype>{WORD})-s(?P<state_dtype>{WORD})", "bf16-sfp32"),
        _GATES,
        _PRECISION,
        Part("nodes, depth, pending chain and B x HV", _ROWS, "n16-d16-p0-w256"),
    ),
)
_NAME = Form(
    " ",
    (
        _OP,
        _FAMILY,
        Part("dk x dv", rf"(?P<dk>{NUMBER})x(?P<dv>{NUMBER})", "128x128"),
        Part("HV/HK", rf"g(?P<group>{NUMBER})", "g2"),
        Part("the types of q, k, v and of the state", rf"(?P<in_dtype>{WORD})/(?P<state_dtype>{WORD})", "bf16/fp32"),
        _GATES,
        _PRECISION,
        Part(
            "nodes, depth and pending chain, if any, and B x HV",
            rf"n(?P<nodes>{NUMBER})(?: d(?P<depth>{NUMBER}))?(?: p(?P<pending>{NUMBER}))? w(?P<work>{NUMBER})",
            "n16 d16 p16 w256",
        ),
    ),
)
#: Sizes that a key names, and the largest of each; node, depth and pending buckets have limits of their own.
_SIZES = {"dk": MAX_SIZE, "dv": MAX_SIZE, "group": MAX_SIZE, "nodes": None, "work": None}
#: What a key looks like, for whoever typed another.
EXAMPLES = f"one reads {_KEY.example}, one of a convolution {CONV_EXAMPLE}"


def parse_key(text: str) -> Specialisation:
    """Return the problem that a key names: as a table and ``--show --json`` write it, or a bucket's name.

    Sizes go to the nearest bucket upward, as in a call. Upper case and blanks around parts do not matter.

    Raises:
        ValueError: it is neither, or names something that no kernel serves; says which part is unknown.
    """
    if not text.strip():
        raise ValueError(f"an empty key names no bucket; {EXAMPLES}")
    op = first_word(plain(text))
    if op not in (*OPS, *CONV_OPS):
        what = f"operation {op!r} is not one of {', '.join((*OPS, *CONV_OPS))}"
        raise KeyFault(text, [what], True, EXAMPLES)
    return parse_conv(text) if op in CONV_OPS else _recurrence(text)


def _recurrence(text: str) -> Problem:
    words = _words(text)
    modes = FAMILIES[words["family"]].modes
    if words["gate_mode"] not in modes:
        raise ValueError(
            f"{text!r}: family {words['family']} has no {words['gate_mode']} gates, only {', '.join(modes)}"
        )
    for name, most in _SIZES.items():
        size = int(words[name])
        if size < 1:
            raise ValueError(f"{text!r}: {name} must be at least 1, got {size}")
        if most is not None and size > most:
            raise ValueError(f"{text!r}: {name} = {size} is above the largest supported value, {most}")
    nodes, pending = row_buckets(words["op"], int(words["nodes"]), int(words["pending"] or 0))
    depth = bucket(int(words["depth"] or nodes), DEPTH_BUCKETS, "depth")
    # A call asks for the depth that its nodes can have.
    deepest = bucket(nodes, DEPTH_BUCKETS, "depth")
    if depth > deepest:
        raise ValueError(f"{text!r}: trees of {nodes} nodes are no deeper than depth {deepest}, got {words['depth']}")
    return Problem(
        op=words["op"],
        family=words["family"],
        dk=int(words["dk"]),
        dv=int(words["dv"]),
        group=int(words["group"]),
        in_dtype=words["in_dtype"],
        state_dtype=words["state_dtype"],
        gate_mode=words["gate_mode"],
        precision=words["precision"],
        nodes=nodes,
        depth=depth,
        pending=pending,
        work=work_bucket(1, int(words["work"])),
    )


def depth_note(text: str, problem: Specialisation, rows: Iterable[Specialisation]) -> str | None:
    """Return which depth a name without one stands for, where tables have rows of another; None otherwise.

    Args:
        text: the key or name.
        problem: what :func:`parse_key` made of it.
        rows: buckets of tables.
    """
    if not isinstance(problem, Problem) or _words(text)["depth"]:
        return None
    same = (r for r in rows if isinstance(r, Problem) and r.replace(depth=problem.depth) == problem)
    others = sorted({r.depth for r in same} - {problem.depth})
    if not others:
        return None
    exist = f"rows of depth {', '.join(map(str, others))} exist too"
    return f"the key names no depth: depth {problem.depth} is taken; {exist} (n{problem.nodes} d{others[0]})"


def _words(text: str) -> dict[str, str]:
    """Return the parts of a key or a name; those that a name leaves out are None.

    Raises:
        KeyFault: it is neither.
    """
    allowed = {
        "op": OPS,
        "family": tuple(FAMILIES),
        "in_dtype": DTYPES,
        "state_dtype": DTYPES,
        "gate_mode": ("raw", "ready"),
        "precision": PRECISIONS,
    }
    return read_parts(text, (_KEY, _NAME), allowed, EXAMPLES)
