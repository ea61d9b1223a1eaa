"""The buckets of convolutions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from bole_codegen.search.targets import Target, sizes
from bole_runtime.kernels.conv_problem import MAX_CHANNELS, MAX_STATE, WIDTHS, ConvProblem
from bole_runtime.kernels.problem import Specialisation, work_bucket


@dataclass(frozen=True)
class ConvGeometry:
    """The convolution of one model on one GPU.

    Attributes:
        channels: C of a rank.
        width: W, taps.
        length: L, inputs that the state keeps a channel.
        bias: whether there is one.
        silu: whether SiLU follows.
        dynamic: whether every node has weights of its own.
    """

    channels: int
    width: int
    length: int
    bias: bool = False
    silu: bool = True
    dynamic: bool = False

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("channels", self.channels, 1, MAX_CHANNELS),
            ("width", self.width, WIDTHS[0], WIDTHS[-1]),
            ("length", self.length, self.width - 1, MAX_STATE),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name} = {value} is not allowed; allowed: {low} to {high}")


def make_conv_targets(
    geometries: Sequence[ConvGeometry],
    *,
    ops: Iterable[str],
    in_dtypes: Iterable[str],
    state_dtypes: Iterable[str],
    nodes: Iterable[int],
    batches: Iterable[int],
    pendings: Iterable[int],
    shape: str = "ragged",
) -> tuple[Target, ...]:
    """Return one target a bucket, in a fixed order. The widest of the launches that fall into a bucket stands for it.

    Raises:
        ValueError: a size is above the largest bucket or below its minimum, or the shape is unknown.
    """
    node_list, pending_list, batch_list = sizes(nodes, pendings, batches, shape)
    found: dict[Specialisation, Target] = {}
    types = list(product(ops, in_dtypes, state_dtypes))
    for op, in_dtype, state_dtype in types:
        conv = op == "tree_conv"
        for g in sorted(geometries, key=lambda g: -g.channels):
            for n, pending, batch in product(node_list, pending_list, reversed(batch_list)):
                problem = ConvProblem(
                    op=op,
                    channels=1 << (g.channels - 1).bit_length(),
                    width=g.width,
                    length=g.length,
                    in_dtype=in_dtype,
                    state_dtype=state_dtype,
                    # A commit moves inputs, whatever is done with them.
                    bias=g.bias and conv,
                    silu=g.silu and conv,
                    dynamic=g.dynamic and conv,
                    nodes=n,
                    pending=pending,
                    work=work_bucket(batch, 1),
                )
                found.setdefault(problem, Target(problem, 1, g.channels, batch, shape))
    return tuple(found.values())
