"""A model of a configuration's time: for ranking without a GPU, and for choosing what to try first with one.

The time of a launch is the sum over its kernels of

    LATENCY + max(memory, compute) + OVERLAP_LOSS * min(memory, compute)

- memory: bytes of the kernel over the bandwidth that its resident programs can draw, the last wave paid in full. By
  Little's law they need ``bandwidth * MEMORY_LATENCY`` bytes in flight; a program holds one tile, or ``stages - 1``
  blocks of it. Workspaces are written and read again, through L2 where they fit.
- compute: programs a multiprocessor runs, times what one takes of it: PROGRAM + serial steps * STEP + warp instructions
  over ISSUE + operations over a share of the tensor-core rate. Operations are weighted by the passes of their precision
  (bf16 1, tf32 2, three bf16 terms 3, three tf32 terms 6). A triangular solve has a serial step a row, or a few a
  block.
- Programs per multiprocessor follow from registers and shared memory of the compiled kernel, or from a guess by tile
  size before it is compiled. Spilled values travel through L2.

The constants were fitted to a dozen times of simple, untuned kernels of this kind on one H200, where predictions are
0.5 to 1.2 times the measurement. Commits follow the instructions of their compiled kernels (docs/performance.md). The
model ranks; it is not a measurement, every table entry that comes from it says ``predicted``, and one only replaces
the analytic default where the model is sure, see ``choose.MODEL_NOISE``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bole_codegen.measure import Traffic, commit_traffic, verify_traffic
from bole_codegen.search.bucket_inputs import recurrence, workload
from bole_codegen.search.kinds import kind_of
from bole_codegen.search.results import KernelResources
from bole_codegen.search.targets import Target
from bole_runtime.gpus import GpuRecord
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, Variant
from bole_runtime.kernels.variants.common import channels, plain

#: Microseconds for a kernel to start and drain inside a graph.
LATENCY = 2.2
#: Microseconds of a multiprocessor that a program takes whatever it does.
PROGRAM = 0.8
#: Microseconds of one dependent step of a solve.
STEP = 0.03
#: Warp instructions that a multiprocessor issues in a microsecond, of kernels that are not one long dot.
ISSUE = 3400.0
#: Warp instructions of a commit for each element of the state a thread holds: a token of ``steps``, 16 of ``path``.
STEP_ISSUE, CHUNK_ISSUE = 7.5, 60.0
#: Seconds from a request to DRAM until its answer.
MEMORY_LATENCY = 0.8e-6
#: Parts of the nominal rates that such kernels reach.
BANDWIDTH_SHARE = 0.9
TENSOR_SHARE = 0.15
L2_SPEEDUP = 2.5
#: Bytes of a workspace that stays in L2 between two kernels.
L2_SHARE = 20e6
#: Part of the shorter of memory and compute time that does not hide behind the other.
OVERLAP_LOSS = 0.2
#: Typical accepted tokens, for commits.
ACCEPTED = 4
PASSES = {
    "native": 1,
    "bf16": 1,
    "bf16x2": 2,
    "bf16x3": 3,
    "bf16x5": 5,
    "bf16x6": 6,
    "tf32": 2,
    "tf32x3": 6,
    "ieee": 16,
}
_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class KernelCost:
    """What one kernel moves and computes.

    Attributes:
        programs: in its grid.
        dram: bytes from and to device memory.
        l2: bytes from and to L2.
        flops: operations of all programs, weighted by passes.
        in_flight: bytes a program requests at a time.
        steps: dependent steps of a program.
        issue: instructions of each warp of a program, where they are known.
        program: microseconds of a multiprocessor that a program takes whatever it does.
    """

    programs: int
    dram: float
    l2: float
    flops: float
    in_flight: float
    steps: float
    issue: float = 0.0
    program: float = PROGRAM


def _rows(problem: Problem) -> int:
    return max(16, 1 << (problem.nodes + problem.pending - 1).bit_length())


@functools.lru_cache(maxsize=256)
def recurrence_traffic(target: Target) -> Traffic:
    """Return the fewest bytes and operations of a verify or a commit of a few tokens."""
    work = workload(target)
    return verify_traffic(work, captured=True) if target.problem.op == "verify" else commit_traffic(work, ACCEPTED)


def guess(problem: Problem, config: Config) -> KernelResources:
    """Return what a kernel probably takes: its tiles spread over the registers of its warps."""
    rows, get = _rows(problem), dict(config.params).get
    bv = int(get("bv", problem.dv))
    bk = problem.dk if get("chunk") else min(int(get("bk", problem.dk)), problem.dk)
    elements = bv * bk + 2 * rows * bv + (rows * rows if config.variant == "fused" else 0)
    registers = 40 + elements // (32 * int(get("warps", 4)))
    shared = (bv + rows) * bk * _SIZE[problem.state_dtype] * max(1, int(get("stages", 1)) - 1)
    return KernelResources(shared, min(255, registers), 4 * max(0, registers - 255))


def _passes(get: Callable[[str, Any], Any], name: str, usual: str) -> int:
    return PASSES.get(get(name, usual), PASSES[usual])


def kernel_costs(target: Target, config: Config, variant: Variant) -> list[KernelCost]:
    """Return the cost of every kernel that a launch of a recurrence runs, in order.

    Parameters are read by the names that variants share; one without a parameter counts as the plain case.
    """
    problem, get = recurrence(target), dict(config.params).get
    grids = [max(1, math.prod(g)) for g in variant.grids(problem, config, target.batch, target.hv)]
    traffic, rows, heads = recurrence_traffic(target), _rows(problem), target.batch * target.hv
    size, dk = _SIZE[problem.state_dtype], problem.dk
    bv, bk = int(get("bv", problem.dv)), min(int(get("bk", dk)), dk)
    ahead = max(1, int(get("stages", 1)) - 1)
    in_flight = min(bv * dk, bv * bk * ahead) * size
    chunk = int(get("chunk", 0))
    if problem.op == "commit":
        tokens = ACCEPTED + problem.pending
        each = bv * dk / (32.0 * int(get("warps", 4)))
        if not chunk:
            return [KernelCost(grids[0], traffic.total, 0, 0, in_flight, tokens, 600.0 + STEP_ISSUE * each * tokens)]
        chunks = -(-tokens // chunk)
        flops = 6.0 * heads * chunks * chunk * dk * problem.dv * _passes(get, "dot", "tf32x3")
        issue = CHUNK_ISSUE * each * chunks * max(1.0, chunk / 16)
        return [KernelCost(grids[0], traffic.total, 0, flops, in_flight, chunk * chunks, issue)]
    tiles = max(1, grids[-1] // max(1, heads))
    again = traffic.inputs * (tiles - 1) * 0.5
    scratch = 4.0 * sum(variant.workspace(problem, config, target.batch, target.hv))
    fits = scratch < L2_SHARE
    readout = 4.0 * rows * dk * bv * _passes(get, "state_dot", "tf32") + 2.0 * rows**2 * bv * _passes(
        get, "mix", "tf32"
    )
    # Rows that decay by channel meet as fp32.
    exact = PASSES["tf32x3"] if channels(problem) or not plain(problem) else 1
    prepare = 4.0 * rows**2 * dk * exact + float(rows) ** 3 * _passes(get, "solve", "tf32x3")
    if len(grids) == 1:
        solve = heads * prepare * tiles if not chunk else grids[0] * 4.0 * rows**2 * bv
        steps = rows if not chunk else rows * 0.6 + rows / chunk * 8
        return [KernelCost(grids[0], traffic.total, again, grids[0] * readout + solve, in_flight, steps)]
    block = int(get("row_block", rows))
    inputs = traffic.inputs * 0.7
    # Several kernels that make R share the work, and each its writes.
    first = [
        KernelCost(
            grid,
            (inputs + (0 if fits else scratch)) / (len(grids) - 1),
            ((scratch if fits else 0) + inputs * (rows // block - 1)) / (len(grids) - 1),
            heads / problem.group * prepare * 0.5 / (len(grids) - 1),
            block * dk * _SIZE[problem.in_dtype],
            (block * 0.5 + (rows / block) * 4) / (len(grids) - 1),
        )
        for grid in grids[:-1]
    ]
    last = KernelCost(
        grids[-1],
        traffic.total + (0 if fits else scratch),
        again + (scratch * tiles if fits else scratch * (tiles - 1)),
        grids[-1] * readout,
        in_flight,
        1,
    )
    return [*first, last]


def resident(resources: KernelResources, warps: int, record: GpuRecord) -> int:
    """Return how many programs a multiprocessor holds at a time."""
    registers = max(1, -(-resources.registers // 8) * 8 * warps * 32)
    shared = record.smem_per_block + 1024
    return max(1, min(record.registers_per_sm // registers, shared // (resources.shared_bytes + 1024), 64 // warps, 32))


def kernel_us(cost: KernelCost, resources: KernelResources, warps: int, record: GpuRecord) -> float:
    """Return the modelled microseconds of one kernel."""
    per_sm = resident(resources, warps, record)
    running = min(cost.programs, per_sm * record.sms)
    bandwidth = record.bandwidth_gbs * 1e9 * BANDWIDTH_SHARE
    share = min(1.0, running * max(1.0, cost.in_flight) / (bandwidth * MEMORY_LATENCY))
    waves = cost.programs / (per_sm * record.sms)
    tail = math.ceil(waves) / waves if waves > 1 else 1.0
    # Spilled values go through L2, written and read, in every program.
    spilled = 2.0 * cost.programs * resources.spill_bytes * warps * 32
    memory = (cost.dram / (bandwidth * share) * tail + (cost.l2 + spilled) / (bandwidth * L2_SPEEDUP)) * 1e6
    # A multiprocessor needs four warps to issue to its four schedulers.
    issue = min(1.0, min(per_sm, max(1.0, cost.programs / record.sms)) * warps / 4)
    rate = record.bf16_tflops * 1e6 / record.sms * TENSOR_SHARE * issue
    program = cost.program + cost.steps * STEP + cost.issue * warps / ISSUE / issue + cost.flops / cost.programs / rate
    compute = max(1.0, cost.programs / record.sms) * program
    return LATENCY + max(memory, compute) + OVERLAP_LOSS * min(memory, compute)


def predict_us(
    target: Target, config: Config, variant: Variant, record: GpuRecord, resources: Sequence[KernelResources] = ()
) -> float:
    """Return the modelled microseconds of a layer.

    Args:
        target: the bucket.
        config: a valid configuration of ``variant``.
        variant: its declaration.
        record: the GPU.
        resources: of each kernel in launch order; a guess when empty.
    """
    kind = kind_of(target.problem)
    costs = kind.costs(target, config, variant)
    warps = [plan.num_warps for plan in variant.plans(target.problem, config)]
    total = 0.0
    for i, cost in enumerate(costs):
        used = resources[i] if i < len(resources) else kind.guess(target.problem, config)
        total += kernel_us(cost, used, warps[i], record)
    return total / kind.modelled_layers(target)


def floor_us(target: Target, record: GpuRecord) -> float:
    """Return the memory floor of a bucket at the nominal bandwidth."""
    return kind_of(target.problem).traffic(target).floor_us(record.bandwidth_gbs)


def promising(
    target: Target,
    configs: Sequence[Config],
    variants: Callable[[str], Variant],
    record: GpuRecord,
    count: int,
) -> list[Config]:
    """Return the configurations that the model likes best, no two alike.

    The best of every variant comes first; each further one differs from all earlier ones of its variant in at least two
    parameters, so that the first trials do not all ask the same question.
    """
    ranked = sorted(
        ((predict_us(target, c, variants(c.variant), record), i) for i, c in enumerate(configs)), key=lambda r: r
    )
    chosen: list[Config] = []
    rest: list[Config] = []
    for _, i in ranked:
        config = configs[i]
        if all(c.variant != config.variant for c in chosen):
            chosen.append(config)
        else:
            rest.append(config)
    for config in rest:
        if len(chosen) >= count:
            break
        near = [c for c in chosen if c.variant == config.variant]
        if all(sum(a != b for a, b in zip(c.params, config.params, strict=True)) >= 2 for c in near):
            chosen.append(config)
    return chosen[:count]
