"""Sizes, layouts and head pairing of families with vectors beside q, k and v."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from bole_testing.cases.base import Inputs, Setup, chain_tree, dense_tree, leaves, random_parents
from bole_testing.cases.checks import check_commit, check_verify
from bole_testing.close import assert_close
from bole_testing.families import family_inputs

from bole_runtime import TreeBatch, commit, set_backend, verify
from bole_runtime.backends import decay
from bole_runtime.families import FAMILIES, get_family

FP32 = Setup(verify, commit, torch.device("cpu"), torch.float32, torch.float32, "lossless")
EVERY = sorted(FAMILIES)
#: One of every kind: vectors of dk and dv, a key of its own, rank two, additive with a skip term.
KINDS = ["comba", "gdn2", "mamba2", "rwkv7"]


@pytest.fixture(autouse=True)
def _torch_backend():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    set_backend("torch")
    yield
    set_backend(None)
    torch.set_num_threads(threads)


def _both(inputs: Inputs) -> None:
    check_commit(FP32, inputs, check_verify(FP32, inputs), leaves(inputs.tree))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("nodes", [1, 2, 9, 17, 33, 63, 100, 129, 200])
def test_nodes(name: str, nodes: int) -> None:
    parents = random_parents(random.Random(nodes), nodes)
    _both(family_inputs(FP32, get_family(name), dense_tree(FP32, [parents]), heads=(1, 2), dims=(12, 8)))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "dims", [(48, 64), (64, 48), (96, 192), (100, 36), (96, 256), (128, 256), (192, 80), (256, 32)]
)
def test_head_dims(name: str, dims: tuple[int, int]) -> None:
    inputs = family_inputs(FP32, get_family(name), dense_tree(FP32, [[-1, 0, 0, 2, 2]]), heads=(1, 1), dims=dims)
    _both(inputs)
    # The last dims count.
    out, _ = verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
    for i in get_family(name).node_gates("ready"):
        changed = {n: t.clone() for n, t in inputs.gates.items()}
        changed[i.name][..., -1] -= 0.5
        other, _ = verify(inputs.q, inputs.k, inputs.v, **{**inputs.arguments, "gates": changed})
        assert (other - out).norm() > 1e-6 * out.norm(), i.name


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("heads", [(1, 1), (1, 3), (2, 4), (5, 5), (3, 12)])
def test_a_one_hot_query_reaches_the_value_heads_of_its_key_head(name: str, heads: tuple[int, int]) -> None:
    spec = get_family(name)
    inputs = family_inputs(FP32, spec, chain_tree(FP32, 1, 3), heads=heads)
    gates = {n: t for n, t in inputs.gates.items() if n not in spec.skip}
    for head in range(heads[0]):
        q = torch.zeros_like(inputs.q)
        q[:, :, head] = inputs.q[:, :, head]
        out, _ = verify(q, inputs.k, inputs.v, **{**inputs.arguments, "gates": gates})
        live = [h for h in range(heads[1]) if bool(out[:, :, h].any())]
        group = heads[1] // heads[0]
        assert live == list(range(head * group, (head + 1) * group))


@pytest.mark.parametrize("name", EVERY)
def test_no_requests(name: str) -> None:
    tree = TreeBatch.from_parents(torch.zeros(0, 4, dtype=torch.int32))
    inputs = family_inputs(FP32, get_family(name), tree)
    out, factors = verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
    assert out.shape == (0, 4, 4, 20)
    pool = inputs.state.clone()
    commit(pool, inputs.slots, factors, torch.zeros(0, dtype=torch.int32))
    assert torch.equal(pool.view(torch.uint8), inputs.state.view(torch.uint8))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("mode", ["ready", "raw"])
def test_slices_of_a_packed_projection(name: str, mode: str) -> None:
    spec = get_family(name)
    if mode not in spec.modes:
        pytest.skip(f"{name} has no raw gates")
    inputs = family_inputs(FP32, spec, dense_tree(FP32, [[-1, 0, 0, 1, 2]] * 2), mode=mode)
    node = {i.name for i in spec.node_gates(mode)}
    parts = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **{n: inputs.gates[n] for n in sorted(node)}}
    rows = torch.cat([t.flatten(2) for t in parts.values()], -1)
    views: dict[str, Any] = {}
    at = 0
    for part, t in parts.items():
        width = t.shape[2:].numel()
        views[part] = rows[..., at : at + width].unflatten(-1, t.shape[2:])
        at += width
    assert not views["v"].is_contiguous()
    gates = {n: views.get(n, t) for n, t in inputs.gates.items()}
    same = inputs.replace(q=views["q"], k=views["k"], v=views["v"], gates=gates)
    _both(same)
    ours, theirs = (verify(x.q, x.k, x.v, **x.arguments)[0] for x in (same, inputs))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["gla", "kda", "rwkv7"])
def test_gram_matrices_in_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = family_inputs(FP32, get_family(name), dense_tree(FP32, [random_parents(random.Random(1), 23)] * 2))
    whole, _ = verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
    for rows in (1, 5, 23):
        monkeypatch.setattr(decay, "_MAX_ELEMENTS", rows * 2 * 4 * 23 * 24)
        _both(inputs)
        part, _ = verify(inputs.q, inputs.k, inputs.v, **inputs.arguments)
        assert_close(f"{rows} rows at a time", part, whole, 1e-6)
