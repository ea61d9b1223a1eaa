"""Commit of convolution states, all layers in one launch: a program moves the inputs of a block of channels."""

from __future__ import annotations

from bole_runtime.kernels.arguments import Argument
from bole_runtime.kernels.conv_problem import ConvProblem
from bole_runtime.kernels.space import Config, GpuLimits, KernelPlan, Param, Variant
from bole_runtime.kernels.variants import conv as c

BC = Param("bc", (64, 128, 256, 512, 1024, 2048), "channels a program owns")

_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def layer_pointers(problem: ConvProblem) -> tuple[Argument, ...]:
    """Pointers that differ from layer to layer: a row of the layer table, or arguments for one layer."""
    return (*c.pointers("state", "state"), *c.pointers("in", "x"), *c.pending_pointers(problem))


def arguments(problem: ConvProblem, table: bool) -> tuple[Argument, ...]:
    """Arguments of the kernel, in order; with ``table`` the layers' pointers come from device memory."""
    return (
        *((Argument("layers_ptr", "table"),) if table else layer_pointers(problem)),
        *c.pointers("index", "slots", "accepted"),
        *c.pointers("i32", "parents", "depths"),
        *c.pointers("i32", "offsets", optional=True),
        *c.pending_scalars(problem),
        Argument("nodes", "int"),
        c.CHANNELS,
        Argument("slot_count", "int"),
        Argument("batch", "int"),
        *c.strides("x", "bn", aligned=True),
        *c.strides("s", "s", aligned=True),
        *c.strides("s", "cl"),
        *c.strides("t", "b"),
    )


def _check(problem: ConvProblem, config: Config, gpu: GpuLimits) -> str | None:
    del gpu
    if config["bc"] > 64 and config["bc"] // 2 >= problem.channels:
        return f"bc={config['bc']} is wider than {problem.channels} channels"
    if not 1 <= config["bc"] // (32 * config["warps"]) <= 16:
        return "too many or too few channels a thread"
    return None


def _default(problem: ConvProblem, gpu: GpuLimits) -> Config:
    del gpu
    bc = min(512, max(64, problem.channels))
    return CONV_COMMIT.config({"bc": bc, "warps": max(1, bc // 128)})


def _plans(problem: ConvProblem, config: Config) -> tuple[KernelPlan, ...]:
    kinds = {"in": _NAMES[problem.in_dtype], "state": _NAMES[problem.state_dtype], "i32": "int32"}
    row = [(a.name, kinds[a.kind]) for a in layer_pointers(problem)]
    plans = []
    for table in (False, True):
        made = c.context(
            problem, config, {"BC": (config["bc"], "channels of a program")}, TABLE=table, pointer_args=row
        )
        made["config_line"] = f"{config} {'layer table' if table else 'one layer'}"
        stem = c.stem(problem, "conv_commit_layers" if table else "conv_commit")
        plans.append(KernelPlan("conv_commit.py.jinja", stem, made, config["warps"], 1, arguments(problem, table)))
    return tuple(plans)


def _grids(problem: ConvProblem, config: Config, batch: int, channels: int) -> tuple[tuple[int, ...], ...]:
    """Grids of both plans. ``batch`` counts the rows of all layers."""
    del problem
    made = (batch * -(-channels // config["bc"]),)
    return made, made


CONV_COMMIT = Variant(
    name="shift",
    op="conv_commit",
    doc="the last inputs of state, pending chain and accepted path, moved in place",
    params=(BC, c.WARPS),
    applies=c.every_problem,
    check=_check,
    default=_default,
    plans=_plans,
    grids=_grids,
    workspace=c.no_workspace,
)
