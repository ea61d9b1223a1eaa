"""Check and time the commit of all layers in one call."""

from __future__ import annotations

from contextlib import ExitStack
from typing import cast

import torch
from peers import CommittingPeer
from torch import Tensor

import bole_runtime.api as api
from bole_codegen.measure import (
    LayerGraph,
    VerifyInputs,
    capture_layers,
    commit_traffic,
    relative_error,
    time_interleaved,
)
from bole_runtime.factors import Factors
from bole_runtime.precision import STATE_BOUND
from verify_bench import oracle, pending
from verify_bench.candidates import Candidate
from verify_bench.rows import Result, Row
from verify_bench.settings import Settings, allowed_error, reason_of, synchronize


def _peer_commit(
    candidate: Candidate, inputs: VerifyInputs, counts: list[int], accepted: Tensor, row: Row, settings: Settings
) -> LayerGraph | None:
    """Check a peer's commit of all layers; return it captured, or None where it is wrong or nothing is timed."""
    peer, layers = cast("CommittingPeer", candidate.peer), len(inputs.layers)
    result = row.commit[candidate.name] = Result(candidate.profile)
    try:
        start = pending.roots(inputs, {0, layers - 1})
        want = {i: oracle.committed_states(start, i, accepted) for i in {0, layers - 1}}
        commit = peer.make_commit(counts)
        commit()
        synchronize(settings)
        result.error = max(relative_error(peer.committed(i), state) for i, state in want.items())
        bound = allowed_error(peer.state_bound, want, inputs.layers[0].state.dtype)
        if not result.error <= bound:
            result.status = f"wrong: error {result.error:.2e} against fp64, bound {bound:.2e}"
        elif settings.timing:
            return capture_layers(lambda i: commit, 1, layers_per_launch=layers)
    except Exception as error:
        result.status = reason_of(error)
    return None


def run_commit(inputs: VerifyInputs, candidates: list[Candidate], row: Row, settings: Settings) -> None:
    """Check and time the commit of all layers. Runs last: it changes the states."""
    work, point = inputs.workload, row.point
    accepted = oracle.accepted_nodes(inputs, settings.accepted)
    counts = oracle.accepted_counts(inputs, accepted)
    traffic = commit_traffic(work, counts, captured=point.factors == "captured")
    if settings.bandwidth_gbs:
        row.commit_floor_us = traffic.floor_us(settings.bandwidth_gbs)
    pools = [layer.state for layer in inputs.layers]
    rows = inputs.slots.long()
    untouched = torch.ones(pools[0].shape[0], dtype=torch.bool, device=pools[0].device)
    untouched[rows] = False
    checked = {0, len(pools) - 1}
    with ExitStack() as stack:
        graphs = {}
        # Peers first: they have copies of the states as those are before any commit.
        for candidate in candidates:
            if candidate.peer is not None:
                graph = _peer_commit(candidate, inputs, counts, accepted, row, settings)
                if graph is not None:
                    graphs[candidate.name] = stack.enter_context(graph)
        for profile in settings.profiles:
            source = next((c for c in candidates if c.profile == profile and len(c.factors) == len(pools)), None)
            if source is None:
                continue
            result = row.commit[profile] = Result(profile)
            factors = [source.factors[i] for i in range(len(pools))]

            def launch(factors: list[Factors] = factors, profile: str = profile) -> None:
                api.commit(pools, inputs.slots, factors, accepted, precision=profile, validate=False)

            try:
                start = pending.roots(inputs, checked)
                want = {i: oracle.committed_states(start, i, accepted) for i in checked}
                spare = pools[0][untouched].clone()
                launch()
                synchronize(settings)
                result.error = max(relative_error(pools[i][rows], state) for i, state in want.items())
                bound = allowed_error(STATE_BOUND[profile], want, pools[0].dtype)
                if not result.error <= bound:
                    result.status = f"wrong: error {result.error:.2e} against fp64, bound {bound:.2e}"
                elif not torch.equal(pools[0][untouched], spare):
                    result.status = "wrong: a slot that is not in the batch changed"
                elif settings.timing:
                    graphs[profile] = stack.enter_context(
                        capture_layers(lambda i, f=launch: f, 1, layers_per_launch=len(pools))
                    )
            except Exception as error:
                result.status = reason_of(error)
        if graphs:
            for profile, timing in time_interleaved(graphs, settings.replays).items():
                row.commit[profile].us, row.commit[profile].spread_us = timing.median_us, timing.spread_us
