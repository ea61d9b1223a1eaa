"""The first candidates of a bucket: defaults, what tables and earlier classes suggest, what the model likes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from bole_codegen.search import roofline
from bole_codegen.search.space import SpaceView
from bole_codegen.search.targets import Target, anchors
from bole_runtime.gpus import GpuRecord
from bole_runtime.kernels.space import Config, GpuLimits

#: Configurations of a variant that the model ranks; more only costs time.
RANKED = 400


def first_candidates(
    views: Sequence[SpaceView],
    searched: Sequence[Target],
    defaults: Mapping[Target, Config],
    warm: Mapping[Target, Sequence[Config]],
    *,
    record: GpuRecord,
    limits: GpuLimits,
    trials: int,
    seed: int,
) -> dict[Target, list[Config]]:
    """Return what each searched bucket tries first, in order.

    Args:
        views: the valid space, one view a variant.
        searched: buckets.
        defaults: analytic default of each bucket of the class.
        warm: what tables or earlier classes suggest, by bucket.
        record: the GPU.
        limits: of the GPU.
        trials: candidates of the class.
        seed: of what the model ranks in large spaces.
    """
    by_name = {v.variant.name: v.variant for v in views}
    rng = random.Random(seed)
    pool: list[Config] = []
    for view in views:
        configs = list(view.configs)
        pool += configs if len(configs) <= RANKED else rng.sample(configs, RANKED)
    others = [c for v in views for c in v.variant.first(v.problem, limits)]
    liked = max(4, trials // (2 * len(searched)))
    # The model tells buckets apart by work: those in between are ranked by a neighbour.
    few = anchors(searched, 3)
    model = {t: roofline.promising(t, pool, by_name.__getitem__, record, liked) for t in few}
    found = {}
    for target in searched:
        # The default of every bucket is compared with in the end, so each must be screened.
        first: Iterable[Config] = [defaults[target], *defaults.values(), *others, *warm.get(target, ())]
        near = min(few, key=lambda t: abs(t.problem.work.bit_length() - target.problem.work.bit_length()))
        found[target] = [*first, *model[near]]
    return found
