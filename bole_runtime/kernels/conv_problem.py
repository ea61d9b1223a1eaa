"""What the kernels of a convolution along trees are specialised for, apart from their tile parameters."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

#: Operations on convolutions. They have geometry of their own, so their problems are of a class of their own.
CONV_OPS: tuple[str, ...] = ("tree_conv", "conv_commit")
#: Fields that say what there is.
SWITCHES: tuple[str, ...] = ("bias", "silu", "dynamic")
#: Widths of the convolution that are served.
WIDTHS = range(2, 9)
#: Longest convolution state, in inputs a channel.
MAX_STATE = 16
#: Most channels that a table can hold.
MAX_CHANNELS = 1 << 17
#: Name of the table of both.
CONV_TABLE = "conv"


@dataclass(frozen=True, order=True)
class ConvProblem:
    """One specialisation of ``tree_conv`` or ``conv_commit``.

    Attributes:
        op: ``tree_conv`` or ``conv_commit``.
        channels: C rounded up to a power of two. Kernels take any number.
        width: W, taps.
        length: L, inputs that the state keeps a channel.
        in_dtype: element type of x.
        state_dtype: element type of the state pool.
        bias: whether there is a bias. Like the next two, False for a commit.
        silu: whether SiLU follows.
        dynamic: whether every node has weights of its own.
        nodes: node bucket.
        pending: pending-chain bucket, 0 when there is no pending chain.
        work: B rounded up to a power of two.
    """

    op: str
    channels: int
    width: int
    length: int
    in_dtype: str
    state_dtype: str
    bias: bool
    silu: bool
    dynamic: bool
    nodes: int
    pending: int
    work: int

    @property
    def table(self) -> str:
        """Name of the table that holds entries for it."""
        return CONV_TABLE

    @property
    def depth(self) -> int:
        """Depth bucket: kernels take any tree, which is at most as deep as it has nodes."""
        return self.nodes

    def key(self) -> str:
        """Return the table key: every field, in a fixed order."""
        return (
            f"{self.op}/c{self.channels}-w{self.width}-l{self.length}/{self.in_dtype}-s{self.state_dtype}"
            f"/{self.switches}/n{self.nodes}-p{self.pending}-w{self.work}"
        )

    @property
    def switches(self) -> str:
        """What there is of bias, SiLU and weights a node, as a key writes it."""
        return "-".join(name for name in SWITCHES if getattr(self, name)) or "plain"

    def for_text(self) -> ConvProblem:
        """Return the problem without what only chooses among kernels; see
        :class:`~bole_runtime.kernels.problem.Specialisation`."""
        return self.replace(channels=1, nodes=1, pending=min(self.pending, 1), work=1)

    def describe(self, kernel: str) -> str:
        """Return one line for people about a kernel."""
        return f"Causal convolution along trees: {kernel}, width {self.width}."

    def replace(self, **changes: object) -> ConvProblem:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
