"""Trees by shape name are valid for any size."""

from __future__ import annotations

import numpy as np
import pytest

from bole_codegen.measure import SHAPES, make_parents, tree_depth, tree_depths

NODES = (1, 4, 8, 9, 16, 17, 28, 32, 64, 100, 128, 129, 200, 512)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nodes", NODES)
def test_every_shape_is_a_tree_of_the_asked_size(shape: str, nodes: int) -> None:
    parents = make_parents(shape, 3, nodes)
    assert parents.shape == (3, nodes)
    assert parents.dtype == np.int32
    assert (parents[:, 0] == -1).all()
    assert (parents[:, 1:] >= 0).all()
    assert (parents < np.arange(nodes)).all()
    assert 0 <= tree_depth(parents) < nodes


def test_small_shapes_by_hand() -> None:
    assert make_parents("chain", 1, 4)[0].tolist() == [-1, 0, 1, 2]
    assert make_parents("star", 1, 4)[0].tolist() == [-1, 0, 0, 0]
    assert make_parents("binary", 1, 7)[0].tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert make_parents("[2, 2, 2]", 1, 15)[0].tolist() == [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert make_parents("3,1", 1, 9)[0].tolist() == [-1, 0, 0, 0, 1, 2, 3, 4, 5]


def test_ragged_is_top_4_with_8_levels_and_differs_by_request_and_seed() -> None:
    parents = make_parents("ragged", 16, 128, seed=3)
    assert tree_depth(parents) == 7
    for row in parents:
        assert np.bincount(row[1:]).max() <= 4
    assert len({row.tobytes() for row in parents}) == 16
    assert np.array_equal(parents, make_parents("ragged", 16, 128, seed=3))
    assert not np.array_equal(parents, make_parents("ragged", 16, 128, seed=4))


def test_depths_of_forests_and_padding() -> None:
    assert tree_depths(np.array([[-1, 0, -1, 2, 1, -2]], np.int32)).tolist() == [[0, 1, 0, 1, 2, -1]]


def test_depths_refuse_a_parent_after_its_child() -> None:
    with pytest.raises(ValueError, match="node 1"):
        tree_depths(np.array([[-1, 2, 0]], np.int32))


@pytest.mark.parametrize("shape", ["", "tree", "2,,2", "0,2", "2,x"])
def test_unknown_shapes_are_refused_by_name(shape: str) -> None:
    with pytest.raises(ValueError, match="unknown tree shape"):
        make_parents(shape, 1, 4)


def test_empty_batch() -> None:
    assert make_parents("ragged", 0, 4).shape == (0, 4)
    with pytest.raises(ValueError, match="nodes >= 1"):
        make_parents("chain", 1, 0)
