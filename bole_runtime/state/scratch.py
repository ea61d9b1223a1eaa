"""Scratch memory that the verifications of a manager can take, before any is made: the most over all its capacities."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import TYPE_CHECKING

import torch

from bole_runtime.backend_choice import backend_name
from bole_runtime.kernels.problem import DEPTH_BUCKETS, NODE_BUCKETS, SMALL, work_bucket
from bole_runtime.state.config import StateConfig

if TYPE_CHECKING:
    from bole_runtime.kernels.problem import Problem
    from bole_runtime.kernels.space import Config, GpuLimits

#: Problem -> configuration, without loading its kernels.
Chooser = Callable[["Problem"], "Config"]


def by_tables(device_name: str, limits: GpuLimits) -> Chooser:
    """Return what dispatch chooses on a GPU, which need not be there."""
    from bole_runtime.tables.lookup import Dispatcher

    # One of its own: a plan must not use up the process's only warning about a missing table.
    tables = Dispatcher()

    def choose(problem: Problem) -> Config:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return tables.resolve(problem, device_name, limits).config

    return choose


def by_device(device: torch.device) -> Chooser:
    """Return what the Triton backend chooses on a device."""
    from bole_runtime.backends.triton_backend import select
    from bole_runtime.kernels.default import default_config

    if device.type == "cpu":
        limits = select.limits_of(-1)[1]
        return lambda problem: select._interpretable(problem, default_config(problem, limits))
    return by_tables(*select.limits_of(torch.cuda.current_device() if device.index is None else device.index))


def scratch_of(config: StateConfig, device: torch.device, batch_invariant: bool) -> int:
    """Return the fp32 elements that a manager on a device reserves; none for a backend that has no scratch memory."""
    if backend_name(device) != "triton":
        return 0
    return most_scratch(config, by_device(device), batch_invariant)


def most_scratch(config: StateConfig, choose: Chooser, batch_invariant: bool) -> int:
    """Return the fp32 elements of scratch memory of the call that takes most.

    Another capacity is another kernel, so that the largest batch of the largest trees need not be the one: every bucket
    within the capacities is looked up, and both settings of ``qk_l2norm``, which a call may choose against its family's
    default. Exact for calls that use all of that, an upper bound for those that keep to a part.

    Args:
        config: of the manager.
        choose: of the device.
        batch_invariant: whether all calls take the kernel of the largest capacities.
    """
    from bole_runtime.backends.triton_backend.select import SHORT
    from bole_runtime.kernels.variants import get_variant, served
    from bole_runtime.state.kernels import verify_problem

    most = 0
    if config.dtype not in SHORT or config.state_dtype not in SHORT:
        return most  # element types without kernels
    for layer in dict.fromkeys(y for y in config.layers if y.spec.kernels):
        for mode, norm in product(layer.spec.modes, (False, True)):
            for nodes, depth, batch in _capacities(config, layer.value_heads, batch_invariant):
                problem = verify_problem(config, layer, mode, nodes, depth, batch, norm)
                if not served(problem):
                    continue
                try:
                    chosen = choose(problem)
                except ValueError:  # nothing serves it here, as such a call will say
                    continue
                sizes = get_variant("verify", chosen.variant).workspace(problem, chosen, batch, layer.value_heads)
                most = max(most, sum(sizes))
    return most


def _capacities(config: StateConfig, heads: int, batch_invariant: bool) -> Iterator[tuple[int, int, int]]:
    """Yield nodes, depth and batch: the largest of every bucket that calls can fall into."""
    if batch_invariant:
        yield config.max_nodes, config.max_depth, config.max_batch
        return
    works = (1 << n for n in range(work_bucket(config.max_batch, heads).bit_length()))
    # A bucket of so little work that not even one request falls into it is that of no call.
    batches = {min(config.max_batch, work // heads) for work in works} - {0}
    for nodes in {min(config.max_nodes, most) for most in (SMALL, *NODE_BUCKETS)}:
        for depth in {min(config.max_depth, nodes - 1, most) for most in DEPTH_BUCKETS}:
            for batch in batches:
                yield nodes, depth, batch
