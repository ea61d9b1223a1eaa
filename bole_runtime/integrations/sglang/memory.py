"""SGLang's snapshot pools are left out, and the memory it would reserve for them is not."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bole_runtime.integrations.sglang.budget_checks import check_algorithm
from bole_runtime.integrations.sglang.options import read_options
from bole_runtime.integrations.sglang.served import NotServed, served

logger = logging.getLogger(__name__)


def pool_init(original: Callable[..., None], pool: Any, **arguments: Any) -> None:
    """Around ``MambaPool.__init__``: states and windows of the slots alone.

    The engine asks for a snapshot a node and request. One node of one request is allocated in its place, so that its
    constructor runs as it was written, and dropped at once.
    """
    if arguments.get("speculative_num_draft_tokens") is None or not served():
        original(pool, **arguments)
        return
    rings = [name for name, value in arguments.items() if "replayssm" in name and value is True]
    if rings:
        raise NotServed(f"{', '.join(rings)}: SGLang's ReplaySSM and Bole's plug-in replace the same thing; choose one")
    spared = arguments["spec_state_size"] + 1, arguments["speculative_num_draft_tokens"]
    original(pool, **{**arguments, "speculative_num_draft_tokens": 1, "spec_state_size": 0})
    cache = pool.mamba_cache
    state = cache.temporal[:, 0].numel() * cache.temporal.element_size()
    pool.mamba_cache = dataclasses.replace(cache, intermediate_ssm=None, intermediate_conv_window=[])
    pool._intermediate_conv_window_phys = []
    logger.info(
        "bole: no snapshots (%.2f GB of states for %d requests of %d nodes were not allocated)",
        spared[0] * spared[1] * state / 2**30, *spared,
    )  # fmt: skip


def node_share(cache_params: Any) -> float:
    """Return what a node's factors take, as a part of a request's states: what SGLang multiplies with nodes."""
    heads, value_dim, key_dim = cache_params.shape.temporal
    channels = sum(math.prod(s) // min(s) for s in cache_params.shape.conv)
    conv_bytes = cache_params.dtype.conv.itemsize
    # Raw convolution inputs; k and v after it (as many channels, q's among them, are an upper bound); fp32 gates: two a
    # head, or with a decay a channel one a channel and one.
    gates = key_dim + 1 if cache_params.is_kda else 2
    factors = channels * conv_bytes + channels * conv_bytes + 4 * gates * heads
    state = heads * value_dim * key_dim * cache_params.dtype.temporal.itemsize
    state += sum(math.prod(s) for s in cache_params.shape.conv) * conv_bytes
    return float(factors / state)


class _Standing:
    """Another object with one attribute changed."""

    def __init__(self, of: Any, **changed: Any) -> None:
        object.__setattr__(self, "_of", of)
        object.__setattr__(self, "_changed", changed)

    def __getattr__(self, name: str) -> Any:
        changed = object.__getattribute__(self, "_changed")
        return changed[name] if name in changed else getattr(object.__getattribute__(self, "_of"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_of"), name, value)


@contextmanager
def _fewer_nodes(configurator: Any, nodes: float) -> Iterator[None]:
    """Let the sizing of pools see ``nodes`` nodes a request: each version reads the number from elsewhere."""
    module = sys.modules[type(configurator).__module__]
    attribute = "speculative_num_draft_tokens"
    if hasattr(module, "get_spec"):
        get_spec = module.get_spec
        module.get_spec = lambda: _Standing(get_spec(), **{attribute: nodes})  # type: ignore[attr-defined]
        try:
            yield
        finally:
            module.get_spec = get_spec  # type: ignore[attr-defined]
        return
    arguments = configurator.server_args
    configurator.server_args = _Standing(arguments, **{attribute: nodes})
    try:
        yield
    finally:
        configurator.server_args = arguments


def reserve(original: Callable[..., Any], configurator: Any, total_rest_memory: Any) -> Any:
    """Around ``KVCacheConfigurator._handle_max_mamba_cache``: factors are reserved for, not snapshots."""
    nodes = _draft_tokens(configurator)
    if nodes is None or not served(configurator.model_config):
        return original(configurator, total_rest_memory)
    if configurator.server_args.pp_size > 1:
        raise NotServed("pipeline parallelism is not served by Bole's plug-in; unset BOLE_SGLANG, or use --tp")
    if read_options().budget:
        check_algorithm(configurator.spec_algorithm)  # whose worker makes the budget's controller; others would not
    share = node_share(configurator.mambaish_config.mamba2_cache_params)
    with _fewer_nodes(configurator, nodes * share):
        left = original(configurator, total_rest_memory)
    logger.info("bole: %.1f %% of a request's states reserved a node, for its factors", 100 * share)
    return left


def _draft_tokens(configurator: Any) -> int | None:
    if configurator.spec_algorithm.is_none():
        return None
    module = sys.modules[type(configurator).__module__]
    source = module.get_spec() if hasattr(module, "get_spec") else configurator.server_args
    nodes: int | None = source.speculative_num_draft_tokens
    return nodes


def pools_of(request_pool: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states [layers, slots, HV, dv, dk] and the convolution windows of all layers.

    The windows are [layers, slots, C, W - 1], of KDA [layers, slots, W - 1, C]. All channels are in one pool.
    """
    cache = request_pool.mamba_pool.mamba_cache
    return cache.temporal, cache.conv[0]
