"""Bytes of a convolution, and what the roofline model of ``roofline.py`` needs to know of its kernels.

Both kernels are a matter of bytes. Instructions count where a program has few bytes: the default for 8192 channels,
four taps, 64 requests of 16 nodes has 1147 of them for the 32 elements of a thread (sm_90, Triton 3.6.0).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bole_codegen.measure import Traffic
from bole_codegen.measure.traffic import ITEMSIZE
from bole_codegen.search.bucket_inputs import COMMIT_LAYERS
from bole_codegen.search.results import KernelResources
from bole_codegen.search.roofline import ACCEPTED, KernelCost
from bole_codegen.search.targets import Target
from bole_runtime.kernels.conv_problem import ConvProblem
from bole_runtime.kernels.space import Config, Variant

#: Warp instructions for each tap of an element that a thread holds: half of those that are counted, since such kernels
#: issue about twice as many in a microsecond as the model's ISSUE, which is of long dots.
TAP_ISSUE = 4.5
#: The same of a program whatever its elements are, and for an element that a commit moves.
BASE_ISSUE, COPY_ISSUE = 60.0, 12.0
#: Microseconds of a multiprocessor that a program takes to begin: many are resident, and wait side by side.
START = 0.05


def conv_problem(target: Target) -> ConvProblem:
    """Return the problem of a target that is of a convolution."""
    assert isinstance(target.problem, ConvProblem)
    return target.problem


def element_size(target: Target, state: bool = False) -> int:
    """Return the bytes of an element of the inputs, or of the state."""
    problem = conv_problem(target)
    return ITEMSIZE[problem.state_dtype if state else problem.in_dtype]


def commit_bytes(target: Target, lengths: Sequence[int]) -> tuple[int, int, int]:
    """Return the bytes of state read, state written and inputs read of a commit of paths of some lengths."""
    problem, channels = conv_problem(target), target.hv
    moved = [min(n + problem.pending, problem.length) for n in lengths]
    each = channels * element_size(target, state=True)
    kept = sum(problem.length - n for n in moved)
    return kept * each, len(lengths) * problem.length * each, sum(moved) * channels * element_size(target)


def conv_traffic(target: Target) -> Traffic:
    """Return the fewest bytes and operations of a layer, inputs copied on the way; a commit of a few tokens."""
    problem, channels, batch = conv_problem(target), target.hv, target.batch
    if problem.op == "conv_commit":
        read, written, inputs = commit_bytes(target, [ACCEPTED] * batch)
        return Traffic(state_read=read, state_written=written, inputs=inputs, outputs=0, factors=0, flops=0)
    size, tokens = element_size(target), batch * problem.nodes
    above = problem.width - 1
    pending = min(problem.pending, above)
    weights = (tokens if problem.dynamic else 1) * channels * problem.width + (channels if problem.bias else 0)
    return Traffic(
        state_read=batch * channels * (above - pending) * element_size(target, state=True),
        state_written=0,
        inputs=(tokens * channels + batch * channels * pending + weights) * size,
        outputs=tokens * channels * size,
        factors=tokens * channels * size,
        flops=2 * tokens * channels * problem.width,
    )


def conv_costs(target: Target, config: Config, variant: Variant) -> list[KernelCost]:
    """Return the cost of the one kernel that a launch runs: of all layers for a commit."""
    problem, get = conv_problem(target), dict(config.params).get
    layers = COMMIT_LAYERS if problem.op == "conv_commit" else 1
    programs = max(1, math.prod(variant.grids(problem, config, target.batch * layers, target.hv)[0]))
    traffic = conv_traffic(target)
    elements = int(get("bc", 1)) * int(get("nb", 1))
    each = elements / (32.0 * int(get("warps", 4)))
    in_flight = elements * element_size(target)
    if problem.op == "conv_commit":
        # All inputs of a channel are asked for at once.
        issue, asked = BASE_ISSUE + COPY_ISSUE * each, in_flight * problem.length
        return [KernelCost(programs, traffic.total * layers, 0, 0, asked, 0, issue, START)]
    # Inputs of the other taps come from L1 or L2.
    again = (problem.width - 1) * traffic.outputs
    issue = BASE_ISSUE + TAP_ISSUE * problem.width * each
    return [KernelCost(programs, traffic.total, again, 0, in_flight, 0, issue, START)]


def conv_guess(problem: ConvProblem, config: Config) -> KernelResources:
    """Return what a kernel probably takes: a few values for each element of a thread."""
    get = dict(config.params).get
    each = int(get("bc", 1)) * int(get("nb", 1)) // (32 * int(get("warps", 4)))
    registers = 40 + 2 * each if problem.op == "tree_conv" else 32 + 2 * each
    return KernelResources(0, min(255, registers), 4 * max(0, registers - 255))
