"""Convolution along trees, a node at a time: rows of channels are vectors, what belongs to a node is a scalar."""

from __future__ import annotations

from bole_runtime.kernels.conv_problem import ConvProblem
from bole_runtime.kernels.space import Config, GpuLimits, KernelPlan, Param, Variant
from bole_runtime.kernels.variants import conv as c

BC = Param("bc", (128, 256, 512), "channels a program owns")
UNROLL = Param("unroll", (1, 2), "nodes whose inputs are asked for together")
#: Inputs of an unrolled step that a thread holds, in elements: more do not fit its registers.
_HELD = 64


def _applies(problem: ConvProblem) -> str | None:
    return "weights that differ from node to node are not shared by a row" if problem.dynamic else None


def _check(problem: ConvProblem, config: Config, gpu: GpuLimits) -> str | None:
    del gpu
    if config["nb"] > max(1, problem.nodes):
        return f"nb={config['nb']} is more than the {problem.nodes} nodes"
    if config["bc"] > 128 and config["bc"] // 2 >= problem.channels:
        return f"bc={config['bc']} is wider than {problem.channels} channels"
    if config["unroll"] > config["nb"]:
        return "more nodes a step than a program owns"
    each = config["bc"] // (32 * config["warps"])
    if each < 4:
        return "a thread wants four channels at least, so that loads are wide"
    if each > 16 or each * problem.width * config["unroll"] > _HELD:
        return "the inputs of a step do not fit the registers of the warps"
    return None


def _default(problem: ConvProblem, gpu: GpuLimits) -> Config:
    """One warp with eight channels a thread; as many nodes a program as leave every multiprocessor sixteen of them."""
    bc, nb = 256, min(32, problem.nodes)
    blocks = problem.work * max(1, problem.channels // bc)
    while nb > 1 and blocks * -(-problem.nodes // nb) < 16 * gpu.sms:
        nb //= 2
    nb = 1 << (nb.bit_length() - 1)
    unroll = 2 if problem.width <= 4 else 1
    return TREE_CONV_ROWS.config({"bc": bc, "nb": nb, "unroll": min(unroll, nb), "warps": 1})


def _plans(problem: ConvProblem, config: Config) -> tuple[KernelPlan, ...]:
    made = c.context(
        problem,
        config,
        {"BC": (config["bc"], "channels of a program"), "NB": (config["nb"], "nodes of a program")},
        BIAS=problem.bias,
        SILU=problem.silu,
        UNROLL=config["unroll"],
    )
    stem = c.stem(problem, "tree_conv_rows")
    return (KernelPlan("tree_conv_rows.py.jinja", stem, made, config["warps"], 1, c.arguments(problem)),)


def _grids(problem: ConvProblem, config: Config, batch: int, channels: int) -> tuple[tuple[int, ...], ...]:
    return (c.grid(config, problem.nodes, batch, channels),)


TREE_CONV_ROWS = Variant(
    name="rows",
    op="tree_conv",
    doc="a node at a time, a vector of channels: its ancestors are scalars; the taps above the roots are summed once",
    params=(BC, c.NB, UNROLL, c.WARPS),
    applies=_applies,
    check=_check,
    default=_default,
    plans=_plans,
    grids=_grids,
    workspace=c.no_workspace,
)
