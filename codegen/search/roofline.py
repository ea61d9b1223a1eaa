"""A model of a configuration's time: for ranking without a GPU, and for choosing what to try first with one.

The time of a launch is the sum over its kernels of

    LATENCY + max(memory, compute) + OVERLAP_LOSS * min(memory, compute)

- memory: bytes of the kernel over the bandwidth that its resident programs can draw, the last wave paid in full. By
  Little's law they need ``bandwidth * MEMORY_LATENCY`` bytes in flight; a program holds one tile, or ``stages - 1``
  blocks of it. Workspaces are written and read again, through L2 where they fit.
- compute: programs a multiprocessor runs, times what one takes of it: PROGRAM + serial steps * STEP + operations over a
  share of the tensor-core rate. Operations are weighted by the passes of their precision (bf16 1, tf32 2, three bf16
  terms 3, three tf32 terms 6). A triangular solve has a serial step a row, or a few a block.
- Programs per multiprocessor follow from registers and shared memory of the compiled kernel, or from a guess by tile
  size before it is compiled. Spilled values travel through L2.

The constants were fitted to a dozen times of simple, untuned kernels of this kind on one H200. The model ranks; it is
not a measurement, and every table entry that comes from it says ``predicted``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bole_codegen.measure import commit_traffic, verify_traffic
from bole_codegen.search.bucket_inputs import workload
from bole_codegen.search.results import KernelResources
from bole_codegen.search.targets import Target
from bole_runtime.gpus import GpuRecord
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config, Variant

#: Microseconds for a kernel to start and drain inside a graph.
LATENCY = 2.2
#: Microseconds of a multiprocessor that a program takes whatever it does.
PROGRAM = 0.8
#: Microseconds of one dependent step of a solve.
STEP = 0.03
#: Seconds from a request to DRAM until its answer.
MEMORY_LATENCY = 0.8e-6
#: Parts of the nominal rates that such kernels reach.
BANDWIDTH_SHARE = 0.9
TENSOR_SHARE = 0.15
L2_SPEEDUP = 2.5
#: Part of the shorter of memory and compute time that does not hide behind the other.
OVERLAP_LOSS = 0.2
#: Typical accepted tokens, for commits.
ACCEPTED = 4
PASSES = {"native": 1, "bf16": 1, "bf16x2": 2, "bf16x3": 3, "tf32": 2, "tf32x3": 6, "ieee": 16}
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
    """

    programs: int
    dram: float
    l2: float
    flops: float
    in_flight: float
    steps: float


def _rows(problem: Problem) -> int:
    return max(16, 1 << (problem.nodes + problem.pending - 1).bit_length())


def guess(problem: Problem, config: Config) -> KernelResources:
    """Return what a kernel probably takes: its tiles spread over the registers of its warps."""
    rows = _rows(problem)
    bv = _get(config, "bv", problem.dv)
    bk = problem.dk if _get(config, "chunk", 0) else min(_get(config, "bk", problem.dk), problem.dk)
    elements = bv * bk + 2 * rows * bv + (rows * rows if config.variant == "fused" else 0)
    registers = 40 + elements // (32 * _get(config, "warps", 4))
    stages = _get(config, "stages", 1)
    shared = (bv + rows) * bk * _SIZE[problem.state_dtype] * max(1, stages - 1)
    return KernelResources(shared, min(255, registers), 4 * max(0, registers - 255))


def _get(config: Config, name: str, default: Any) -> Any:
    return config.as_dict().get(name, default)


def _tile(problem: Problem, config: Config) -> tuple[float, float]:
    """Return the bytes of a program's state tile and those it requests at a time."""
    size = _SIZE[problem.state_dtype]
    bv, bk = _get(config, "bv", problem.dv), min(_get(config, "bk", problem.dk), problem.dk)
    ahead = max(1, _get(config, "stages", 1) - 1)
    return bv * problem.dk * size, min(bv * problem.dk, bv * bk * ahead) * size


def _readout_flops(problem: Problem, config: Config, rows: int) -> float:
    bv = _get(config, "bv", problem.dv)
    state = 4.0 * rows * problem.dk * bv * PASSES[_get(config, "state_dot", "tf32")]
    return float(state + 2 * rows * rows * bv * PASSES[_get(config, "mix", "tf32")])


def _prepare_flops(problem: Problem, config: Config, rows: int) -> float:
    gram = 4 * rows * rows * problem.dk
    return float(gram + rows**3 * PASSES[_get(config, "solve", "tf32x3")])


def kernel_costs(target: Target, config: Config, variant: Variant) -> list[KernelCost]:
    """Return the cost of every kernel that a launch of a configuration runs, in order."""
    problem = target.problem
    work = workload(target)
    grids = [math.prod(g) for g in variant.grids(problem, config, target.batch, target.hv)]
    rows = _rows(problem)
    tile, in_flight = _tile(problem, config)
    heads = target.batch * target.hv
    if problem.op == "commit":
        traffic = commit_traffic(work, ACCEPTED)
        chunk = _get(config, "chunk", 16)
        flops = float(heads * 6 * chunk * problem.dk * problem.dv * PASSES[_get(config, "dot", "tf32x3")])
        return [KernelCost(grids[0], traffic.total, 0, flops, in_flight, chunk)]
    traffic = verify_traffic(work)
    tiles = max(1, grids[-1] // max(1, heads))
    again = traffic.inputs * (tiles - 1) * 0.5
    scratch = 4.0 * sum(variant.workspace(problem, config, target.batch, target.hv))
    fits = scratch < 20e6
    readout = grids[-1] * _readout_flops(problem, config, rows)
    prepare = _prepare_flops(problem, config, rows)
    if len(grids) == 1:
        chunk = _get(config, "chunk", 0)
        solve = heads * prepare * tiles if not chunk else grids[0] * rows * rows * tile / problem.dk
        steps = rows if not chunk else rows * 0.6 + rows / chunk * 8
        return [KernelCost(grids[0], traffic.total, again, readout + solve, in_flight, steps)]
    block = _get(config, "row_block", rows)
    inputs = traffic.inputs * 0.7
    return [
        KernelCost(
            grids[0],
            inputs + (0 if fits else scratch),
            (scratch if fits else 0) + inputs * (rows // block - 1),
            heads / problem.group * prepare * 0.5,
            block * problem.dk * _SIZE[problem.in_dtype],
            block * 0.5 + (rows / block) * 4,
        ),
        KernelCost(
            grids[1],
            traffic.total + (0 if fits else scratch),
            again + (scratch * tiles if fits else scratch * (tiles - 1)),
            readout,
            in_flight,
            1,
        ),
    ]


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
    program = PROGRAM + cost.steps * STEP + cost.flops / cost.programs / rate
    compute = max(1.0, cost.programs / record.sms) * program
    return LATENCY + max(memory, compute) + OVERLAP_LOSS * min(memory, compute)


def predict_us(
    target: Target, config: Config, variant: Variant, record: GpuRecord, resources: Sequence[KernelResources] = ()
) -> float:
    """Return the modelled microseconds of a launch.

    Args:
        target: the bucket.
        config: a valid configuration of ``variant``.
        variant: its declaration.
        record: the GPU.
        resources: of each kernel in launch order; a guess when empty.
    """
    costs = kernel_costs(target, config, variant)
    warps = [_get(config, "warps", 4)] * len(costs)
    if len(costs) > 1:
        warps[0] = _get(config, "prepare_warps", warps[0])
    total = 0.0
    for i, cost in enumerate(costs):
        used = resources[i] if i < len(resources) else guess(target.problem, config)
        total += kernel_us(cost, used, warps[i], record)
    return total


def floor_us(target: Target, record: GpuRecord) -> float:
    """Return the memory floor of a bucket at the nominal bandwidth."""
    work = workload(target)
    traffic = verify_traffic(work) if target.problem.op == "verify" else commit_traffic(work, ACCEPTED)
    return traffic.floor_us(record.bandwidth_gbs)


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
