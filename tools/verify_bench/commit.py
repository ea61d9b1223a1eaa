"""Check and time the commit of all layers in one call."""

from __future__ import annotations

from contextlib import ExitStack

import torch

import bole_runtime.api as api
from bole_codegen.measure import VerifyInputs, capture_layers, commit_traffic, relative_error, time_interleaved
from bole_runtime.factors import Factors
from bole_runtime.precision import STATE_BOUND
from verify_bench import oracle
from verify_bench.candidates import Candidate
from verify_bench.rows import Result, Row
from verify_bench.settings import Settings, allowed_error, reason_of, synchronize


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
    with ExitStack() as stack:
        graphs = {}
        for profile in settings.profiles:
            source = next((c for c in candidates if c.profile == profile and len(c.factors) == len(pools)), None)
            if source is None:
                continue
            result = row.commit[profile] = Result(profile)
            factors = [source.factors[i] for i in range(len(pools))]

            def launch(factors: list[Factors] = factors, profile: str = profile) -> None:
                api.commit(pools, inputs.slots, factors, accepted, precision=profile, validate=False)

            try:
                want = {i: oracle.committed_states(inputs, i, accepted) for i in {0, len(pools) - 1}}
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
