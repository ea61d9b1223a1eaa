"""From a table key or a bucket's name back to the problem."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bole_codegen.search.targets import MAX_SIZE
from bole_codegen.tables.conv_keys import CONV_EXAMPLE, parse_conv
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

_KEY = re.compile(
    r"(?P<op>[a-z]+)/(?P<family>[a-z0-9_]+)/dk(?P<dk>\d+)-dv(?P<dv>\d+)-g(?P<group>\d+)"
    r"/(?P<in_dtype>[a-z0-9]+)-s(?P<state_dtype>[a-z0-9]+)/(?P<gate_mode>[a-z]+)/(?P<precision>[a-z]+)"
    r"/n(?P<nodes>\d+)-d(?P<depth>\d+)-p(?P<pending>\d+)-w(?P<work>\d+)"
)
_NAME = re.compile(
    r"(?P<op>[a-z]+) (?P<family>[a-z0-9_]+) (?P<dk>\d+)x(?P<dv>\d+) g(?P<group>\d+)"
    r" (?P<in_dtype>[a-z0-9]+)/(?P<state_dtype>[a-z0-9]+) (?P<gate_mode>[a-z]+) (?P<precision>[a-z]+)"
    r" n(?P<nodes>\d+)(?: d(?P<depth>\d+))?(?: p(?P<pending>\d+))? w(?P<work>\d+)"
)
#: Sizes that a key names, and the largest of each; node, depth and pending buckets have limits of their own.
_SIZES = {"dk": MAX_SIZE, "dv": MAX_SIZE, "group": MAX_SIZE, "nodes": None, "work": None}
_EXAMPLE = "verify/gdn/dk128-dv128-g2/bf16-sfp32/raw/fast/n16-d16-p0-w256"


def parse_key(text: str) -> Specialisation:
    """Return the problem that a key names: as a table and ``--show --json`` write it, or a bucket's name.

    Sizes go to the nearest bucket upward, as in a call.

    Raises:
        ValueError: it is neither, or names something that no kernel serves.
    """
    return parse_conv(text) if text.split("/")[0].split(" ")[0].strip() in CONV_OPS else _recurrence(text)


def _recurrence(text: str) -> Problem:
    words = _words(text)
    allowed = {"op": OPS, "family": tuple(FAMILIES), "in_dtype": DTYPES, "state_dtype": DTYPES, "precision": PRECISIONS}
    for name, values in {**allowed, "gate_mode": ("raw", "ready")}.items():
        if words[name] not in values:
            raise ValueError(f"{text!r}: {name} {words[name]!r} is not one of {', '.join(values)}")
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
        ValueError: it is neither.
    """
    found = _KEY.fullmatch(text.strip()) or _NAME.fullmatch(" ".join(text.split()))
    if found is None:
        raise ValueError(f"{text!r} is no table key; one reads {_EXAMPLE}, one of a convolution {CONV_EXAMPLE}")
    return found.groupdict()
