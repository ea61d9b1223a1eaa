"""The torch backend reads no values on the host: it runs on the meta device, whose tensors have none.

What would need one there (``.item()``, ``bool(tensor)``, boolean indexing) raises. A CUDA graph can hold what passes.
"""

from __future__ import annotations

import copy

import pytest
import torch

from bole_runtime import TreeBatch
from bole_runtime.backends import torch_backend
from bole_runtime.calls import CommitCall, CommitLayer, VerifyCall
from bole_runtime.capture import factors_of
from bole_runtime.factors import PendingChain
from bole_runtime.families import FAMILIES, InputSpec

HEADS, DIMS, SLOTS = (2, 4), (16, 12), 3
INT = torch.int32


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _tree(packed: bool) -> TreeBatch:
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]])
    if packed:
        tree = copy.copy(TreeBatch.from_packed(parents.flatten(), torch.tensor([0, 4, 8]), 4))
    else:
        tree = copy.copy(TreeBatch.from_parents(parents))
    for name in ("parents", "depths", "ancestors", "status", "offsets"):
        if getattr(tree, name) is not None:
            setattr(tree, name, getattr(tree, name).to("meta"))
    tree.device = torch.device("meta")
    return tree


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_verify_and_commit(name: str, packed: bool) -> None:
    spec, tree = FAMILIES[name], _tree(packed)
    mode = spec.modes[-1]

    def made(i: InputSpec, *lead: int) -> torch.Tensor:
        return empty(*(lead if i.shape[0] == "node" else ()), *i.sizes(HEADS, DIMS))

    gates = {i.name: made(i, *tree.lead) for i in (*spec.node_gates(mode), *spec.parameters(mode))}
    floats = {i.name: float(i.default or 0.0) for i in spec.options(mode)}
    pending = PendingChain(
        empty(SLOTS, 5, HEADS[0], DIMS[0]),
        empty(SLOTS, 5, HEADS[1], DIMS[1]),
        {i.name: made(i, SLOTS, 5) for i in spec.node_gates(spec.kept_mode(mode))},
        empty(SLOTS, dtype=INT),
        empty(SLOTS, dtype=INT),
    )
    q, k = (empty(*tree.lead, HEADS[0], DIMS[0]) for _ in range(2))
    v, out = (empty(*tree.lead, HEADS[1], DIMS[1]) for _ in range(2))
    pool, slots = empty(SLOTS, HEADS[1], DIMS[1], DIMS[0]), empty(2, dtype=INT)
    call = VerifyCall(
        spec, q, k, v, gates, mode, floats.pop("beta_scale", 1.0), pool, slots, tree, "lossless", 1.0,
        spec.qk_l2norm, out, pending, options=floats,
    )  # fmt: skip
    torch_backend.verify(call)
    layers = (CommitLayer(pool, factors_of(call)),)
    for actions in (None, empty(2, dtype=INT)):
        torch_backend.commit(CommitCall(spec, layers, slots, empty(2, dtype=INT), tree, "lossless", None, actions))


def test_a_read_would_be_seen() -> None:
    x = empty(3)
    for read in (lambda: bool(x.any()), lambda: x.max().item(), lambda: x.tolist(), lambda: x[x > 0]):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read()
