"""From a table key or a bucket's name back to the problem."""

from __future__ import annotations

import re

from bole_runtime.families import FAMILIES
from bole_runtime.kernels.problem import (
    DEPTH_BUCKETS,
    DTYPES,
    NODE_BUCKETS,
    OPS,
    PENDING_BUCKETS,
    PRECISIONS,
    Problem,
    bucket,
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
_EXAMPLE = "verify/gdn/dk128-dv128-g2/bf16-sfp32/raw/fast/n16-d16-p0-w256"


def parse_key(text: str) -> Problem:
    """Return the problem that a key names: as a table and ``--show --json`` write it, or a bucket's name.

    Sizes go to the nearest bucket upward, as in a call.

    Raises:
        ValueError: it is neither, or names something that no kernel serves.
    """
    found = _KEY.fullmatch(text.strip()) or _NAME.fullmatch(" ".join(text.split()))
    if found is None:
        raise ValueError(f"{text!r} is no table key; one reads {_EXAMPLE}")
    words = found.groupdict()
    allowed = {"op": OPS, "family": tuple(FAMILIES), "in_dtype": DTYPES, "state_dtype": DTYPES, "precision": PRECISIONS}
    for name, values in {**allowed, "gate_mode": ("raw", "ready")}.items():
        if words[name] not in values:
            raise ValueError(f"{text!r}: {name} {words[name]!r} is not one of {', '.join(values)}")
    nodes = bucket(int(words["nodes"]), NODE_BUCKETS, "nodes")
    work = max(1, int(words["work"]))
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
        depth=bucket(int(words["depth"] or nodes), DEPTH_BUCKETS, "depth"),
        pending=bucket(int(words["pending"] or 0), PENDING_BUCKETS, "pending"),
        work=1 << (work - 1).bit_length(),
    )
