"""From the key or the name of a convolution's bucket back to the problem."""

from __future__ import annotations

from bole_codegen.tables.key_parts import NUMBER, WORD, Form, Part, read_parts
from bole_runtime.kernels.conv_problem import CONV_OPS, MAX_CHANNELS, MAX_STATE, SWITCHES, WIDTHS, ConvProblem
from bole_runtime.kernels.problem import DTYPES, NODE_BUCKETS, PENDING_BUCKETS, bucket, work_bucket

_OP = Part("an operation", rf"(?P<op>{WORD})", "tree_conv")
_SWITCHES = Part(f"plain or {', '.join(SWITCHES)}", r"(?P<switches>[a-z-]+)", "silu")
_SHAPE = rf"c(?P<channels>{NUMBER})-w(?P<width>{NUMBER})-l(?P<length>{NUMBER})"
_KEY = Form(
    "/",
    (
        _OP,
        Part("channels, width and length of the state", _SHAPE, "c8192-w4-l3"),
        Part("the types of x and of the state", rf"(?P<in_dtype>{WORD})-s(?P<state_dtype>{WORD})", "bf16-sbf16"),
        _SWITCHES,
        Part(
            "nodes, pending chain and B",
            rf"n(?P<nodes>{NUMBER})-p(?P<pending>{NUMBER})-w(?P<work>{NUMBER})",
            "n16-p0-w8",
        ),
    ),
)
_NAME = Form(
    " ",
    (
        _OP,
        Part("channels x width", rf"(?P<channels>{NUMBER})x(?P<width>{NUMBER})", "8192x4"),
        Part("length of the state", rf"l(?P<length>{NUMBER})", "l3"),
        Part("the types of x and of the state", rf"(?P<in_dtype>{WORD})/(?P<state_dtype>{WORD})", "bf16/bf16"),
        _SWITCHES,
        Part(
            "nodes, a pending chain, if any, and B",
            rf"n(?P<nodes>{NUMBER})(?: p(?P<pending>{NUMBER}))? w(?P<work>{NUMBER})",
            "n16 w8",
        ),
    ),
)
CONV_EXAMPLE = _KEY.example


def parse_conv(text: str) -> ConvProblem:
    """Return the problem that a key or a name of a convolution's bucket names. Sizes go to the nearest bucket upward.

    Raises:
        ValueError: it is neither, or names something that no kernel serves.
    """
    allowed = {"op": CONV_OPS, "in_dtype": DTYPES, "state_dtype": DTYPES}
    words = read_parts(text, (_KEY, _NAME), allowed, f"of a convolution, one reads {CONV_EXAMPLE}")
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
