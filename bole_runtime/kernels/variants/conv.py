"""Convolution along trees: a program gathers the ancestors of a block of nodes, for a block of channels."""

from __future__ import annotations

from typing import Any

from bole_runtime.kernels.arguments import Argument
from bole_runtime.kernels.conv_problem import ConvProblem
from bole_runtime.kernels.space import Config, GpuLimits, KernelPlan, Param, Variant

BC = Param("bc", (32, 64, 128, 256, 512, 1024), "channels a program owns")
NB = Param("nb", (1, 2, 4, 8, 16, 32), "nodes a program owns")
WARPS = Param("warps", (1, 2, 4, 8), "warps a program")

#: Programs a multiprocessor that hide the latency of dependent loads.
_PROGRAMS = 4


def pointers(kind: str, *names: str, optional: bool = False) -> tuple[Argument, ...]:
    """Pointer arguments of one element type."""
    return tuple(Argument(f"{n}_ptr", kind, optional) for n in names)


def strides(prefix: str, dims: str, aligned: bool = False) -> tuple[Argument, ...]:
    """Stride arguments of a tensor."""
    return tuple(Argument(f"stride_{prefix}{d}", "stride", aligned=aligned) for d in dims)


#: A multiple of 16 like an aligned stride, so that masked loads of channels stay wide.
CHANNELS = Argument("channels", "stride", aligned=True)
#: Usually 1, which Triton folds: no division then.
NODE_BLOCKS = Argument("node_blocks", "stride", unit=True)


def pending_scalars(problem: ConvProblem) -> tuple[Argument, ...]:
    """Scalars of the rings."""
    return (Argument("pcapacity", "int"), *strides("p", "sn", aligned=True)) if problem.pending else ()


def pending_pointers(problem: ConvProblem) -> tuple[Argument, ...]:
    """Pointers to the rings."""
    return (*pointers("in", "px"), *pointers("i32", "plength", "pstart")) if problem.pending else ()


def arguments(problem: ConvProblem) -> tuple[Argument, ...]:
    """Arguments of the kernel, in order."""
    return (
        *pointers("in", "x", "weight"),
        *(pointers("in", "bias") if problem.bias else ()),
        *pointers("state", "state"),
        *pointers("index", "slots"),
        *pointers("i32", "parents", "depths"),
        *pointers("i32", "offsets", optional=True),
        *pointers("in", "out"),
        *pointers("in", "capture", optional=True),
        *pending_pointers(problem),
        *pending_scalars(problem),
        Argument("nodes", "int"),
        NODE_BLOCKS,
        CHANNELS,
        Argument("slot_count", "int"),
        *strides("x", "bn", aligned=True),
        *strides("w", "bnct" if problem.dynamic else "ct"),
        *(strides("bias", "c") if problem.bias else ()),
        *strides("s", "s", aligned=True),
        *strides("s", "cl"),
        *strides("o", "bn", aligned=True),
        *strides("c", "bn", aligned=True),
        *strides("t", "b"),
    )


def spec_line(problem: ConvProblem) -> str:
    """What a kernel was rendered for, as its header says it."""
    switches = [name for name in ("bias", "silu", "dynamic") if getattr(problem, name)]
    return " ".join(
        [
            f"{problem.op} width{problem.width} length{problem.length} {problem.in_dtype} state {problem.state_dtype}",
            *switches,
            *(["pending"] if problem.pending else []),
        ]
    )


def stem(problem: ConvProblem, what: str) -> str:
    """Readable name of a kernel."""
    switches = "".join(f"_{name}" for name in ("bias", "silu", "dynamic") if getattr(problem, name))
    return f"{what}_w{problem.width}l{problem.length}_{problem.in_dtype}_s{problem.state_dtype}{switches}" + (
        "_pending" if problem.pending else ""
    )


def context(problem: ConvProblem, config: Config, constants: dict[str, tuple[Any, str]], **more: Any) -> dict[str, Any]:
    """Everything a template reads."""
    sizes = {"WIDTH": (problem.width, "taps"), "LENGTH": (problem.length, "inputs that the state keeps"), **constants}
    return {
        "constants": [(name, value, doc) for name, (value, doc) in sizes.items()],
        "PENDING": problem.pending > 0,
        "spec_line": spec_line(problem),
        "config_line": str(config),
        **more,
    }


def every_problem(problem: ConvProblem) -> str | None:
    """The kernels of a convolution serve every problem that has passed the checks of the call."""
    del problem
    return None


def no_workspace(problem: ConvProblem, config: Config, batch: int, channels: int) -> tuple[int, int]:
    """No scratch memory."""
    del problem, config, batch, channels
    return 0, 0


def grid(config: Config, nodes: int, batch: int, channels: int) -> tuple[int, ...]:
    """Launch grid: the blocks of nodes of a block of channels are neighbours, since they share inputs."""
    return batch * -(-nodes // config["nb"]), -(-channels // config["bc"])


def _grids(problem: ConvProblem, config: Config, batch: int, channels: int) -> tuple[tuple[int, ...], ...]:
    return (grid(config, problem.nodes, batch, channels),)


def _check(problem: ConvProblem, config: Config, gpu: GpuLimits) -> str | None:
    del gpu
    threads = 32 * config["warps"]
    if config["nb"] > max(1, problem.nodes):
        return f"nb={config['nb']} is more than the {problem.nodes} nodes"
    each = config["nb"] * config["bc"] // threads
    if config["bc"] > 32 and config["bc"] // 2 >= problem.channels:
        return f"bc={config['bc']} is wider than {problem.channels} channels"
    if each < 1:
        return "more threads than elements"
    if each > 32:
        return "the accumulators do not fit the registers of the warps"
    return None


def _default(problem: ConvProblem, gpu: GpuLimits) -> Config:
    """Wide rows and as many nodes as leave the device enough programs.

    What is loaded a channel (weights, what is above the roots) is shared by the nodes of a thread, so a thread takes 32
    elements, fewer where wide convolutions would need too many registers.
    """
    bc = min(256, max(32, problem.channels))
    nb = min(16, problem.nodes)
    blocks = problem.work * max(1, problem.channels // bc)
    while nb > 1 and blocks * -(-problem.nodes // nb) < _PROGRAMS * gpu.sms:
        nb //= 2
    warps = max(1, min(8, nb * bc // (1024 if problem.width <= 4 and not problem.dynamic else 512)))
    return TREE_CONV.config({"bc": bc, "nb": nb, "warps": warps})


def _plans(problem: ConvProblem, config: Config) -> tuple[KernelPlan, ...]:
    made = context(
        problem,
        config,
        {"BC": (config["bc"], "channels of a program"), "NB": (config["nb"], "nodes of a program")},
        BIAS=problem.bias,
        SILU=problem.silu,
        DYNAMIC=problem.dynamic,
    )
    return (KernelPlan("tree_conv.py.jinja", stem(problem, "tree_conv"), made, config["warps"], 1, arguments(problem)),)


TREE_CONV = Variant(
    name="gather",
    op="tree_conv",
    doc="ancestors by following parents, W - 1 steps; inputs of all taps gathered, summed in fp32",
    params=(BC, NB, WARPS),
    applies=every_problem,
    check=_check,
    default=_default,
    plans=_plans,
    grids=_grids,
    workspace=no_workspace,
)
