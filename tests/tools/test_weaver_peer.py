"""Weaver as a peer: it loads from a folder, is called as its own benchmark calls it, and gives right numbers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from bole_testing.peers import compiled_only, interpreted
from peers import PeerOptions, PeerRefuses, load_peers
from peers.weaver import workspace_bytes

from bole_codegen.measure import Workload, make_verify_inputs
from bole_runtime.kernels.problem import Problem

needs_weaver = pytest.mark.skipif("BOLE_WEAVER" not in os.environ, reason="set BOLE_WEAVER to a folder with its files")

#: Imports what the real files import, and nothing of them otherwise.
FUSED = """
from collections import namedtuple
TreeStructure = namedtuple("TreeStructure", "batch nodes depth parents")
class LazyGDNVerifyState: pass
def alloc_tree_structure_buffers(N, T, max_depth, device): return TreeStructure(N, T, max_depth, None)
def build_tree_structure_into_fast(parents, buffers): return buffers._replace(parents=parents)
"""
TRITON = """
from sglang.srt.layers.attention.fla.gdn_tree_fused import LazyGDNVerifyState, TreeStructure
import torch
_WORKSPACE = {}
def tree_gdn_triton_verify(**arguments):
    _WORKSPACE["A"] = torch.zeros(2)
    return {**arguments, "structure": TreeStructure}
"""


def make_folder(folder: Path, triton: str = TRITON) -> str:
    (folder / "gdn_tree_fused.py").write_text(FUSED)
    (folder / "gdn_tree_triton.py").write_text(triton)
    return str(folder)


def draw(batch: int = 3, nodes: int = 5, dims: tuple[int, int] = (16, 8), heads: tuple[int, int] = (2, 4), **kinds):
    problem = Problem("verify", "gdn", *dims, heads[1] // heads[0], "bf16", "fp32", "raw", "fast", 16, 8, 0, 8)
    return make_verify_inputs(problem, *heads, batch, nodes, "ragged", layers=2, device="cpu", **kinds)


def test_both_precisions_load_without_sglang(tmp_path: Path) -> None:
    before = set(sys.modules)
    options = PeerOptions(weaver=make_folder(tmp_path))
    loaded, missing = load_peers(["weaver-tf32", "weaver-tf32x3"], options)
    assert not missing
    assert [(p.name, p.profile, p.commits) for p in loaded] == [
        ("weaver-tf32", "fast", False), ("weaver-tf32x3", "lossless", False)
    ]  # fmt: skip
    assert not any(m == "sglang" or m.startswith("sglang.") for m in set(sys.modules) - before)


def test_a_checkout_of_the_branch_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "python/sglang/srt/layers/attention/fla"
    folder.mkdir(parents=True)
    make_folder(folder)
    assert load_peers(["weaver-tf32"], PeerOptions(weaver=str(tmp_path)))[0]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda d: None, "no --weaver PATH"),
        (lambda d: str(d), "holds no gdn_tree_fused.py"),
        (lambda d: make_folder(d, "import sglang.srt.server_args"), "weaver gdn_tree_triton.py"),
        (lambda d: make_folder(d, "x = 1"), "has no tree_gdn_triton_verify"),
    ],
)
def test_what_cannot_load_is_listed_with_its_reason(tmp_path: Path, make, reason: str) -> None:
    loaded, missing = load_peers(["weaver-tf32"], PeerOptions(weaver=make(tmp_path)))
    assert loaded == []
    assert reason in missing["weaver-tf32"]


def test_it_is_called_with_raw_gates_and_trees_built_before(tmp_path: Path) -> None:
    inputs = draw()
    (peer,), _ = load_peers(["weaver-tf32x3"], PeerOptions(weaver=make_folder(tmp_path)))
    prepared = peer.prepare(inputs, "ragged", 1 << 30)
    prepared.make_layer(1)()
    given = prepared.output(1)
    assert given["precision"] == "tf32x3"
    assert given["initial_state_source"] is inputs.layers[1].state
    assert (given["tree"].batch, given["tree"].nodes, given["tree"].depth) == (3, 5, inputs.depth)
    assert isinstance(given["tree"], given["structure"])
    assert given["q"].shape == (3, 5, 2, 16)
    assert given["use_qk_l2norm_in_kernel"] is True
    prepared.poison()
    assert prepared._scratch()["A"].isnan().all()
    assert prepared.launches == 4


def test_other_problems_are_refused(tmp_path: Path) -> None:
    (peer,), _ = load_peers(["weaver-tf32"], PeerOptions(weaver=make_folder(tmp_path)))
    assert peer.refuses(Workload(64, 64, 16, 32)) is None
    assert "not of kda" in peer.refuses(Workload(1, 16, 4, 4, family="kda"))
    assert "pending" in peer.refuses(Workload(1, 4, 4, 4, pending=3))
    inputs = draw()
    inputs.layers[0].raw.clear()
    with pytest.raises(PeerRefuses, match="raw gates"):
        peer.prepare(inputs, "ragged", 1 << 30)
    # 64 requests of 64 nodes: A and the masked Q K 2 x 33.6 MB, inverses 16.8, U 67.1, decays 0.5 + 0.5.
    assert workspace_bytes(Workload(64, 64, 16, 32)) == 4 * 2048 * (2 * 64 * 64 + 64 * 32 + 64 * 128 + 2 * 64)
    assert peer.memory_bytes(Workload(64, 64, 16, 32)) > workspace_bytes(Workload(64, 64, 16, 32))


NUMBERS = """
from bole_codegen.measure import make_verify_inputs, relative_error
from bole_runtime.kernels.problem import Problem
from bole_runtime.reference import verify_sequential
from bole_runtime.tree import TreeBatch
from peers import PeerOptions, load_peers

peers, missing = load_peers(["weaver-tf32", "weaver-tf32x3"], PeerOptions(weaver={weaver!r}))
assert not missing, missing
problem = Problem("verify", "gdn", 32, 16, 2, "fp32", "fp32", "raw", "fast", 16, 8, 0, 8)
for peer in peers:
    for function in peer._functions.values():
        function.__globals__["range"] = counted
    for shape, nodes in (("ragged", 9), ("ragged", 40), ("chain", 6), ("2,2,2", 15)):
        inputs = make_verify_inputs(problem, 2, 4, 2, nodes, shape, layers=2, device="cpu", seed=7)
        prepared = peer.prepare(inputs, shape, 1 << 30)
        prepared.make_layer(1)()
        prepared.poison()
        prepared.make_layer(0)()
        layer = inputs.layers[0]
        want = verify_sequential(
            layer.q, layer.k, layer.v, gates=layer.raw, state=layer.state, slots=inputs.slots,
            tree=TreeBatch.from_parents(inputs.parents), recurrence="gdn",
        )
        error = relative_error(prepared.output(0), want)
        # The interpreter multiplies in fp32, whatever the precision.
        assert error < 3e-6, (peer.name, shape, nodes, error)
        print("right", peer.name, shape, nodes, error)
"""


@needs_weaver
@pytest.mark.slow
def test_the_real_kernels_agree_with_the_sequential_recurrence() -> None:
    assert interpreted(NUMBERS, weaver=os.environ["BOLE_WEAVER"]).count("right") == 8


@needs_weaver
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
@pytest.mark.parametrize("nodes", [16, 64])
def test_the_real_kernels_compile_for_an_h200(precision: str, nodes: int) -> None:
    (peer,), missing = load_peers([f"weaver-{precision}"], PeerOptions(weaver=os.environ["BOLE_WEAVER"]))
    assert not missing
    inputs = draw(2, nodes, (128, 128), (2, 4))
    with compiled_only() as made:
        prepared = peer.prepare(inputs, "ragged", 1 << 30)
        built = len(made)
        prepared.make_layer(0)()
    assert built == 1
    assert len(made) - built == prepared.launches
    assert all(kernel.asm["cubin"] for _, kernel in made)
    assert torch.is_tensor(prepared.output(0))
