"""Bad arguments: the message names the argument, nothing has run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bole_runtime import ConvFactors, ConvPending, Factors, TreeBatch, conv_commit, tree_conv

TREE = TreeBatch.chain(2, 3)


def arguments(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "x": torch.zeros(2, 3, 8),
        "weight": torch.zeros(8, 4),
        "bias": torch.zeros(8),
        "state": torch.zeros(5, 8, 3),
        "slots": torch.tensor([0, 1]),
        "tree": TREE,
    }
    return {**made, **changes}


def ring(*shape: int, length: int = 0, start: int = 0, dtype: torch.dtype = torch.int32) -> ConvPending:
    full = [torch.full((shape[0],), n, dtype=dtype) for n in (length, start)]
    return ConvPending(torch.zeros(*shape), *full)


BAD = {
    "x type": ({"x": [1]}, TypeError, r"^x: expected a torch.Tensor, got list"),
    "x dtype": ({"x": torch.zeros(2, 3, 8, dtype=torch.int32)}, TypeError, r"^x: dtype torch.int32 is not allowed"),
    "x packed": ({"x": torch.zeros(6, 8)}, ValueError, r"^x: expected dense \[B, N, C\] .* got shape \(6, 8\)"),
    "x nodes": ({"x": torch.zeros(2, 4, 8)}, ValueError, r"^x: expected shape \(2, 3, 8\)"),
    "x channels": ({"x": torch.zeros(2, 3, 0)}, ValueError, r"^x: there must be at least one channel"),
    "x stride": ({"x": torch.zeros(2, 8, 3).transpose(1, 2)}, ValueError, r"^x: the last dimension must be contiguous"),
    "weight shape": ({"weight": torch.zeros(8, 1, 4)}, ValueError, r"^weight: expected \(8, W\) .*squeeze\(1\)"),
    "weight channels": ({"weight": torch.zeros(7, 4)}, ValueError, r"^weight: expected \(8, W\)"),
    "weight of other nodes": ({"weight": torch.zeros(2, 2, 8, 4)}, ValueError, r"^weight: .*one a node, \(2, 3, 8,"),
    "width 1": ({"weight": torch.zeros(8, 1)}, ValueError, r"^weight: width 1 is not allowed; allowed: 2 to 8"),
    "width 9": ({"weight": torch.zeros(8, 9)}, ValueError, r"^weight: width 9 is not allowed"),
    "bias shape": ({"bias": torch.zeros(7)}, ValueError, r"^bias: expected shape \(8,\)"),
    "bias type": ({"bias": 1.0}, TypeError, r"^bias: expected a torch.Tensor, got float"),
    "state short": ({"state": torch.zeros(5, 8, 2)}, ValueError, r"^state: expected shape \(slots, 8, L\) with L from"),
    "state long": ({"state": torch.zeros(5, 8, 17)}, ValueError, r"^state: .* to 16, got \(5, 8, 17\)"),
    "state turned": ({"state": torch.zeros(5, 3, 8)}, ValueError, r"^state: .*pool.transpose\(1, 2\)"),
    "slots shape": ({"slots": torch.tensor([0])}, ValueError, r"^slots: expected shape \(2,\)"),
    "slots dtype": ({"slots": torch.tensor([0.0, 1.0])}, TypeError, r"^slots: dtype torch.float32"),
    "slot beyond": ({"slots": torch.tensor([0, 5])}, ValueError, r"^slots: slots\[1\] = 5 is outside -1"),
    "tree": ({"tree": [[-1, 0]]}, TypeError, r"^tree: expected a TreeBatch"),
    "activation": ({"activation": "relu"}, ValueError, r"^activation: 'relu' is not allowed; allowed: 'silu'"),
    "activation type": ({"activation": True}, TypeError, r"^activation: expected a string or None, got bool"),
    "out shape": ({"out": torch.zeros(2, 3, 7)}, ValueError, r"^out: expected shape"),
    "out expanded": ({"out": torch.zeros(1, 1, 8).expand(2, 3, 8)}, ValueError, r"^out: expanded"),
    "out dtype": ({"out_dtype": torch.int8}, TypeError, r"^out_dtype: torch.int8 is not allowed"),
    "factors": ({"factors": torch.zeros(2, 3, 8)}, TypeError, r"^factors: expected a ConvFactors or None"),
    "factors dtype": (
        {"factors": ConvFactors.allocate(TREE, channels=8, width=4)}, TypeError, r"^factors.x: dtype torch.bfloat16"
    ),
    "factors width": (
        {"factors": ConvFactors.allocate(TREE, channels=8, width=3, dtype=torch.float32)}, ValueError,
        r"^factors: for width 3, but the weight has 4 taps",
    ),
    "pending": ({"pending": torch.zeros(5, 2, 8)}, TypeError, r"^pending: expected a ConvPending or None"),
    "pending slots": ({"pending": ring(4, 2, 8)}, ValueError, r"^pending.x: expected \(5, capacity, 8\)"),
    "pending empty": ({"pending": ring(5, 0, 8)}, ValueError, r"^pending.x: .*at least one row"),
    "pending index": ({"pending": ring(5, 2, 8, dtype=torch.int64)}, TypeError, r"^pending.length: dtype torch.int64"),
    "pending length": ({"pending": ring(5, 2, 8, length=3)}, ValueError, r"^pending.length: values must be 0 to 2"),
    "pending start": ({"pending": ring(5, 2, 8, start=2)}, ValueError, r"^pending.start: values must be 0 to 1"),
    "variant": ({"variant": "gather"}, TypeError, r"^variant: expected a Config"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_tree_conv(name: str) -> None:
    changes, error, message = BAD[name]
    with pytest.raises(error, match=message):
        tree_conv(**arguments(**changes))


def test_overlaps() -> None:
    x = torch.zeros(2, 3, 8)
    with pytest.raises(ValueError, match=r"^out: overlaps x in memory"):
        tree_conv(**arguments(x=x, out=x))
    with pytest.raises(ValueError, match=r"^factors.x: is x itself"):
        tree_conv(**arguments(x=x, factors=ConvFactors(x, 4, TREE)))


COMMITS = {
    "pool short": ({"pools": torch.zeros(5, 8, 2)}, ValueError, r"^pools: expected shape"),
    "pool expanded": ({"pools": torch.zeros(1, 8, 3).expand(5, 8, 3)}, ValueError, r"^pools: expanded \(stride 0\)"),
    "pool twice": ({"twice": True}, ValueError, r"^pools: two layers share a pool"),
    "layers": ({"pools": [torch.zeros(5, 8, 3)] * 2}, ValueError, r"^pools, factors: expected the same number"),
    "none": ({"pools": [], "factors": []}, ValueError, r"^pools, factors: .*at least one"),
    "factors": ({"factors": torch.zeros(1)}, TypeError, r"^factors: expected a ConvFactors"),
    "accepted shape": ({"accepted": torch.tensor([0])}, ValueError, r"^accepted: expected shape \(2,\)"),
    "accepted beyond": ({"accepted": torch.tensor([0, 3])}, ValueError, r"^accepted: accepted\[1\] = 3 is outside"),
    "accepted padding": ({"accepted": torch.tensor([2, 0])}, ValueError, r"^accepted: accepted\[0\] = 2 is a padding"),
    "slot twice": ({"slots": torch.tensor([1, 1])}, ValueError, r"^slots: requests 0 and 1 both commit to slot 1"),
    "variant": ({"variant": 1}, TypeError, r"^variant: expected a Config"),
    "other tree": ({"other": True}, ValueError, r"^factors\[1\]: all layers of a commit must share the tree"),
}


@pytest.mark.parametrize("name", COMMITS)
def test_conv_commit(name: str) -> None:
    changes, error, message = COMMITS[name]
    tree = TreeBatch.from_parents(torch.tensor([[-1, 0, -2]] * 2))
    factors = ConvFactors(torch.ones(2, 3, 8), 4, tree)
    pool = torch.zeros(5, 8, 3)
    made: dict[str, Any] = {
        "pools": pool, "slots": torch.tensor([0, 1]), "factors": factors, "accepted": torch.tensor([0, 1])
    }  # fmt: skip
    made.update({k: v for k, v in changes.items() if k in {*made, "variant"}})
    if "twice" in changes:
        made.update(pools=[pool, pool], factors=[factors, factors])
    if "other" in changes:
        made.update(pools=[pool, pool + 1], factors=[factors, ConvFactors(factors.x, 4, TREE)])
    with pytest.raises(error, match=message):
        conv_commit(**made)
    assert bool((pool == 0).all())


@pytest.mark.parametrize(("name", "value"), [("channels", 0), ("width", 1), ("width", 9)])
def test_allocate(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: {value} is not allowed"):
        ConvFactors.allocate(TREE, **{"channels": 4, "width": 4, name: value})


def test_empty_batches_and_pools() -> None:
    tree = TreeBatch(0, 3)
    out, factors = tree_conv(
        torch.zeros(0, 3, 8), torch.zeros(8, 4), state=torch.zeros(2, 8, 3), slots=torch.zeros(0).long(), tree=tree
    )
    assert out.shape == (0, 3, 8)
    conv_commit(torch.zeros(2, 8, 3), torch.zeros(0).long(), factors, torch.zeros(0).long())
    empty = torch.zeros(0, 8, 3)
    out, factors = tree_conv(**arguments(state=empty, slots=torch.tensor([-1, -1])))
    assert bool((out == 0).all())
    conv_commit(empty, torch.tensor([-1, -1]), factors, torch.tensor([0, 0]))


@pytest.mark.parametrize(
    ("allocate", "sizes"),
    [
        (ConvFactors.allocate, {"channels": 4, "width": 4}),
        (Factors.allocate, {"key_heads": 1, "value_heads": 1, "dk": 4, "dv": 4}),
    ],
)
def test_buffers_of_a_wrong_type_are_refused(allocate: Any, sizes: dict[str, int]) -> None:
    with pytest.raises(TypeError, match="tree: expected a TreeBatch, got NoneType"):
        allocate(None, **sizes, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"dtype: torch\.int32 is not allowed"):
        allocate(TreeBatch.chain(1, 2), **sizes, dtype=torch.int32)
