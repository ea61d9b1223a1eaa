"""From the key or the name of a convolution's bucket back to the problem."""

from __future__ import annotations

import re

from bole_runtime.kernels.conv_problem import CONV_OPS, MAX_CHANNELS, MAX_STATE, SWITCHES, WIDTHS, ConvProblem
from bole_runtime.kernels.problem import DTYPES, NODE_BUCKETS, PENDING_BUCKETS, bucket, work_bucket

CONV_EXAMPLE = "tree_conv/c8192-w4-l3/bf16-sbf16/silu/n16-p0-w8"
_KEY = re.compile(
    r"(?P<op>[a-z_]+)/c(?P<channels>\d+)-w(?P<width>\d+)-l(?P<length>\d+)"
    r"/(?P<in_dtype>[a-z0-9]+)-s(?P<state_dtype>[a-z0-9]+)/(?P<switches>[a-z-]+)/n(?P<nodes>\d+)-p(?P<pending>\d+)-w(?P<work>\d+)"
)
_NAME = re.compile(
    r"(?P<op>[a-z_]+) (?P<channels>\d+)x(?P<width>\d+) l(?P<length>\d+)"
    r" (?P<in_dtype>[a-z0-9]+)/(?P<state_dtype>[a-z0-9]+) (?P<switches>[a-z-]+)"
    r" n(?P<nodes>\d+)(?: p(?P<pending>\d+))? w(?P<work>\d+)"
)


def parse_conv(text: str) -> ConvProblem:
    """Return the problem that a key or a name of a convolution's bucket names. Sizes go to the nearest bucket upward.

    Raises:
        ValueError: it is neither, or names something that no kernel serves.
    """
    found = _KEY.fullmatch(text.strip()) or _NAME.fullmatch(" ".join(text.split()))
    if found is None:
        raise ValueError(f"{text!r} is no table key of a convolution; one reads {CONV_EXAMPLE}")
    words = found.groupdict()
    for name, values in {"op": CONV_OPS, "in_dtype": DTYPES, "state_dtype": DTYPES}.items():
        if words[name] not in values:
            raise ValueError(f"{text!r}: {name} {words[name]!r} is not one of {', '.join(values)}")
    switches = [] if words["switches"] == "plain" else words["switches"].split("-")
    for name in switches:
        if name not in SWITCHES:
            raise ValueError(f"{text!r}: {name!r} is not one of plain, {', '.join(SWITCHES)}")
    if switches and words["op"] == "conv_commit":
        raise ValueError(f"{text!r}: a commit moves inputs, so its key reads plain, got {words['switches']}")
    width = int(words["width"])
    for name, low, high in (
        ("channels", 1, MAX_CHANNELS),
        ("width", WIDTHS[0], WIDTHS[-1]),
        ("length", width - 1, MAX_STATE),
        ("nodes", 1, NODE_BUCKETS[-1]),
        ("work", 1, 1 << 40),
    ):
        if not low <= int(words[name]) <= high:
            raise ValueError(f"{text!r}: {name} = {words[name]} is not allowed; allowed: {low} to {high}")
    return ConvProblem(
        op=words["op"],
        channels=1 << (int(words["channels"]) - 1).bit_length(),
        width=width,
        length=int(words["length"]),
        in_dtype=words["in_dtype"],
        state_dtype=words["state_dtype"],
        bias="bias" in switches,
        silu="silu" in switches,
        dynamic="dynamic" in switches,
        nodes=bucket(int(words["nodes"]), NODE_BUCKETS, "nodes"),
        pending=bucket(int(words["pending"] or 0), PENDING_BUCKETS, "pending"),
        work=work_bucket(int(words["work"]), 1),
    )
