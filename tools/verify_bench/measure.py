"""Measure one point: draw inputs, check every candidate, time those that are right, check again."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from peers import PeerRefuses, PeerUnavailable
from torch import Tensor

from bole_codegen.measure import (
    CaptureError,
    VerifyInputs,
    capture_layers,
    floor_us,
    host_overhead_us,
    input_bytes_per_layer,
    is_cold,
    layers_for_cold_l2,
    make_verify_inputs,
    relative_error,
    time_interleaved,
    verify_traffic,
)
from bole_runtime.kernels.problem import Problem
from bole_runtime.kernels.space import Config
from bole_runtime.tree import TreeBatch
from verify_bench import oracle, pending, stages
from verify_bench.candidates import TORCH_DTYPES, Candidate, bole_candidate, captured_factors, peer_candidate
from verify_bench.commit import run_commit
from verify_bench.grid import Point
from verify_bench.rows import Result, Row
from verify_bench.settings import MARGIN, Settings, allowed_error, reason_of, synchronize


def _free_bytes(device: str) -> int:
    if device != "cuda":
        return 1 << 30
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def _plan_layers(point: Point, settings: Settings) -> tuple[int, int]:
    """Return (layers, L2 bytes) so that states are cold and everything fits in about a third of the free memory."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size if settings.device == "cuda" else 0
    work = point.workload
    if settings.layers is not None:
        return settings.layers, l2
    tokens = work.batch * work.nodes
    outputs = 3 * tokens * work.hv * work.dv * TORCH_DTYPES[point.out_dtype].itemsize
    factors = tokens * work.factor_bytes_per_node if point.factors == "captured" else 0
    one = input_bytes_per_layer(work) + outputs + factors
    cap = _free_bytes(settings.device) // 3
    # A model's layers run as one graph: its start should not weigh more here, on one of few.
    return layers_for_cold_l2(work.state_bytes, l2, minimum=8, memory_cap=cap, bytes_per_layer=one), l2


def _worst(candidate: Candidate, references: dict[int, Tensor], get: Callable[[int], Tensor]) -> float:
    return max(relative_error(get(index), reference) for index, reference in references.items())


def _check(candidate: Candidate, result: Result, references: dict[int, Tensor], settings: Settings) -> None:
    """Run the checked layers with poisoned outputs and record the errors; sets the status where one is too large."""
    begin = time.perf_counter()
    candidate.make_layer(0)()
    synchronize(settings)
    result.first_call_s = round(time.perf_counter() - begin, 3)
    candidate.poison()
    for index in references:
        candidate.make_layer(index)()
    synchronize(settings)
    result.error = _worst(candidate, references, candidate.output)
    bound = allowed_error(candidate.bound, references, candidate.output(0).dtype)
    if not result.error <= bound:
        result.status = f"wrong: error {result.error:.2e} against fp64, bound {bound:.2e}"
        return
    if candidate.exact is not None:
        exact = candidate.exact
        result.error_fp32 = _worst(candidate, references, exact)
        bound = MARGIN * candidate.bound
        if not result.error_fp32 <= bound:
            result.status = f"wrong: error {result.error_fp32:.2e} with fp32 output, bound {bound:.2e}"


def _bole_candidates(inputs: VerifyInputs, tree: TreeBatch, settings: Settings, row: Row) -> list[Candidate]:
    factors = captured_factors(inputs, tree) if row.point.factors == "captured" else None
    waiting = pending.chains(inputs)
    made = []
    for profile in settings.profiles:
        wanted: list[tuple[str, Config | None]] = [(profile, None)] if settings.tuned else []
        for config in settings.pinned:
            name = f"{profile}@{config.variant}"
            taken = sum(n.startswith(name) for n, _ in wanted)
            wanted.append((f"{name}#{taken + 1}" if taken else name, config))
        for name, config in wanted:
            row.results[name] = Result(profile, variant=str(config or ""))
            try:
                made.append(bole_candidate(name, profile, inputs, tree, factors, config, waiting))
            except Exception as error:
                row.results[name].status = reason_of(error)
    return made


def _peer_candidates(inputs: VerifyInputs, point: Point, settings: Settings, row: Row) -> list[Candidate]:
    made = []
    for peer in settings.peers:
        row.peers.append(peer.name)
        result = row.results[peer.name] = Result(peer.profile, variant=peer.version)
        if settings.peer_nodes is not None and point.nodes not in settings.peer_nodes:
            result.status = "not asked: outside --peer-nodes"
            continue
        result.includes, result.commits = peer.includes, peer.commits
        reason = peer.refuses(point.workload)
        if reason is not None:
            result.status = f"refused: {reason}"
            continue
        # A tenth stays free for the reference and for graph pools.
        budget = _free_bytes(settings.device) * 9 // 10 - (2 << 30 if settings.device == "cuda" else 0)
        need = peer.memory_bytes(point.workload)
        if need > budget:
            result.status = f"does not fit: {need / 1e9:.1f} GB of its own memory, {max(0, budget) / 1e9:.1f} GB free"
            continue
        try:
            prepared = peer.prepare(inputs, point.shape, budget)
            made.append(peer_candidate(peer, prepared, inputs))
        except PeerRefuses as error:
            result.status = f"refused: {error}"
        except PeerUnavailable as error:
            result.status = f"does not fit: {error}"
        except Exception as error:
            result.status = reason_of(error)
    return made


def _peer_floor(point: Point, candidate: Candidate, settings: Settings) -> float | None:
    """Return the memory floor of a peer's call: nothing captured, and the states written where it commits."""
    if not settings.bandwidth_gbs:
        return None
    work = point.workload
    return floor_us(verify_traffic(work).total + candidate.commits * work.state_bytes, settings.bandwidth_gbs)


def _time_candidates(candidates: list[Candidate], references: dict[int, Tensor], row: Row, settings: Settings) -> None:
    with ExitStack() as stack:
        graphs = {}
        for candidate in candidates:
            try:
                graphs[candidate.name] = stack.enter_context(capture_layers(candidate.make_layer, row.layers))
            except CaptureError as error:
                row.results[candidate.name].status = reason_of(error)
        if not graphs:
            return
        times = time_interleaved(graphs, settings.replays)
        for candidate in candidates:
            if candidate.name not in graphs:
                continue
            # The graph's own outputs, after the timing: what was timed is what was checked.
            result = row.results[candidate.name]
            candidate.poison()
            graphs[candidate.name].replay()
            synchronize(settings)
            error = _worst(candidate, references, candidate.output)
            bound = allowed_error(candidate.bound, references, candidate.output(0).dtype)
            if not error <= bound:
                result.status = f"wrong in a graph replay: error {error:.2e}, bound {bound:.2e}"
                continue
            result.us, result.spread_us = times[candidate.name].median_us, times[candidate.name].spread_us
            if settings.stages:
                result.stages = stages.split(candidate.make_layer, row.layers)


def _time_build(inputs: VerifyInputs, tree: TreeBatch, settings: Settings) -> float:
    copies = 20
    with capture_layers(lambda i: lambda: tree.update_(inputs.parents), copies) as graph:
        return time_interleaved({"build": graph}, settings.replays)["build"].median_us


def run_point(point: Point, settings: Settings, seed: int) -> Row:
    """Measure one point.

    Raises:
        DeviceLost: a kernel broke the CUDA context.
    """
    row = Row(point)
    work = point.workload
    try:
        row.layers, l2 = _plan_layers(point, settings)
    except ValueError as error:
        row.note = f"does not fit: {error}"
        return row
    row.cold = is_cold(row.layers, work.state_bytes, l2)
    if settings.bandwidth_gbs:
        traffic = verify_traffic(work, captured=point.factors == "captured")
        row.floor_us = traffic.floor_us(settings.bandwidth_gbs)
    problem = Problem(
        "verify", point.family, point.dk, point.dv, point.hv // point.hk, point.in_dtype, point.state_dtype,
        point.gates, "fast", 16, 8, 0, 1,
    )  # fmt: skip
    inputs = make_verify_inputs(
        problem, point.hk, point.hv, point.batch, point.nodes, point.shape, row.layers, seed, settings.device,
        out_dtype=point.out_dtype,
    )  # fmt: skip
    inputs = pending.add_pending(inputs, work, seed)
    row.depth = inputs.depth
    tree = TreeBatch.from_parents(inputs.parents, max_depth=inputs.depth)
    checked = {0, row.layers - 1}
    start = pending.roots(inputs, checked)
    references = {i: oracle.verify_outputs(start, i) for i in checked}
    del start
    bole = _bole_candidates(inputs, tree, settings, row)
    right: list[Candidate] = []
    for candidate in [*bole, *_peer_candidates(inputs, point, settings, row)]:
        result = row.results[candidate.name]
        result.variant, result.workspace_bytes = candidate.variant, candidate.workspace_bytes
        result.includes = candidate.includes
        if candidate.peer is not None:
            result.launches = candidate.peer.launches
            result.floor_us = _peer_floor(point, candidate, settings)
        settings.log(f"  {point.title}: checking {candidate.name}")
        try:
            _check(candidate, result, references, settings)
            if result.status == "ok" and settings.eager and candidate.exact is not None and settings.timing:
                result.host_us = host_overhead_us(candidate.make_layer(0)).median_us
        except Exception as error:
            result.status = reason_of(error)
        if result.status == "ok":
            right.append(candidate)
    try:
        if settings.timing and right:
            _time_candidates(right, references, row, settings)
            row.build_us = _time_build(inputs, tree, settings)
        if settings.commit:
            ready = [c for c in right if c in bole or hasattr(c.peer, "make_commit")]
            for candidate in ready:
                for index in range(row.layers):
                    candidate.make_layer(index)()
            run_commit(inputs, ready, row, settings)
    except Exception as error:
        row.note = reason_of(error)
    return row
