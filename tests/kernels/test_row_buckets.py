"""Up to 8 nodes above up to 8 pending tokens are a bucket of their own, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import table_fakes as fakes
import torch

from bole_codegen.search.targets import Geometry, make_targets
from bole_codegen.tables.keys import parse_key
from bole_runtime import LayerGeometry, StateManager, TreeBatch, gpus
from bole_runtime.backends.triton_backend.select import buckets
from bole_runtime.kernels import default_config
from bole_runtime.kernels.problem import Problem, row_buckets
from bole_runtime.kernels.variants.common import tile_rows
from bole_runtime.tables.kinds import kind_of
from bole_runtime.tables.lookup import Dispatcher
from bole_runtime.tables.schema import bucket_reason

SMALL = fakes.PROBLEM.replace(nodes=8, depth=8, pending=8)


@pytest.mark.parametrize(
    ("sizes", "want"),
    [
        ((1, 1), (8, 8)),
        ((8, 8), (8, 8)),
        ((8, 0), (16, 0)),
        ((9, 8), (16, 16)),
        ((8, 9), (16, 16)),
        ((4, 20), (16, 32)),
        ((17, 5), (32, 16)),
    ],
)
def test_only_both_together(sizes: tuple[int, int], want: tuple[int, int]) -> None:
    assert row_buckets("verify", *sizes) == want
    bigger = tuple(max(16, w) if w else 0 for w in want)
    for op in ("commit", "tree_conv", "conv_commit"):
        assert row_buckets(op, *sizes) == bigger
    nodes, depth, pending, _ = buckets("verify", sizes[0], 3, sizes[1], 1, 1)
    assert (nodes, depth, pending) == (want[0], 8, want[1])


def test_sixteen_rows() -> None:
    limits = gpus.get("h200").limits()
    for precision in ("fast", "lossless"):
        for work in (32, 2048):
            problem = SMALL.replace(precision=precision, work=work)
            assert tile_rows(problem) == 16
            assert default_config(problem, limits).as_dict().get("row_block", 16) == 16


def test_keys_and_targets() -> None:
    key = SMALL.key()
    assert parse_key(key) == SMALL
    assert parse_key(key.replace("n8-d8-p8", "n5-d3-p2")) == SMALL
    assert parse_key(key.replace("n8-d8-p8", "n5-d3-p9")) == SMALL.replace(nodes=16, pending=16)
    assert parse_key("verify gdn 128x128 g2 bf16/fp32 raw fast n8 p8 w32").depth == 8
    made = make_targets(
        [Geometry(16, 32, 128, 128)], ops=["verify", "commit"], families=["gdn"], in_dtypes=["bf16"],
        state_dtypes=["fp32"], gate_modes=["raw"], precisions=["fast"], nodes=[4, 8, 16], batches=[1], pendings=[0, 8],
    )  # fmt: skip
    rows = [(t.problem.op, t.problem.nodes, t.problem.depth, t.problem.pending) for t in made]
    assert rows == [
        ("verify", 8, 8, 8), ("verify", 16, 16, 0), ("verify", 16, 16, 16), ("commit", 16, 16, 0),
        ("commit", 16, 16, 16),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "right"),
    [({}, True), ({"op": "commit"}, False), ({"pending": 16}, False), ({"pending": 0}, False), ({"nodes": 16}, False)],
)
def test_entries_of_tables(changes: dict[str, Any], right: bool) -> None:
    entry = fakes.entry(SMALL.replace(**changes), {"BV": 64, "STAGES": 1, "MODE": "rhs"})
    assert (bucket_reason(entry) is None) == right


def test_what_stands_in_has_as_many_rows(tmp_path: Path) -> None:
    rank = kind_of(SMALL).rank

    def away(problem: Problem, **changes: Any) -> tuple[float, ...] | None:
        return rank(problem, SMALL.replace(**{"nodes": 16, "depth": 16, **changes}))

    own, alone = away(SMALL, nodes=8, depth=8), away(SMALL, pending=0)
    assert own is not None
    assert alone is not None
    assert own < alone
    # Tiles of 32 rows, and of 64, are what these calls do without.
    assert away(SMALL, pending=16) is None
    assert away(SMALL, nodes=32, pending=0) is None
    for pending in (0, 16):
        assert away(SMALL.replace(nodes=16, pending=pending), nodes=8, depth=16) is None
    found = Dispatcher().resolve(SMALL.replace(work=2048), "NVIDIA H200", gpus.get("h200").limits())
    assert (found.entry.problem.nodes, found.entry.problem.pending) in ((8, 8), (16, 0))


def test_bits_that_must_not_change_keep_trees_to_one_bucket() -> None:
    sizes: dict[str, Any] = {"slots": 4, "max_batch": 2, "policy": "deferred", "dtype": torch.float32}
    layer, slots = LayerGeometry(1, 2, 8, 8), torch.tensor([-1, -1])
    manager = StateManager([layer], batch_invariant=True, max_nodes=12, pending=8, **sizes)
    manager.round(TreeBatch(2, 9), slots)
    with pytest.raises(ValueError, match=r"max_nodes = 8 takes another kernel .*: 9 to 12, with any"):
        manager.round(TreeBatch(2, 8), slots)
    for nodes, pending in ((8, 8), (12, 9)):
        manager = StateManager([layer], batch_invariant=True, max_nodes=nodes, pending=pending, **sizes)
        manager.round(TreeBatch(2, 1), slots)
