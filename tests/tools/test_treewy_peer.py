"""TreeWY as a peer: it loads from a file, is called as its own tests call it, and gives right outputs and states."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from bole_testing.peers import compiled_only, interpreted
from peers import PeerOptions, PeerRefuses, PeerUnavailable, load_peers
from peers.treewy import CHAIN, FILE, TREE, ancestors

from bole_codegen.measure import Workload, make_verify_inputs
from bole_runtime.kernels.problem import Problem

needs_treewy = pytest.mark.skipif("BOLE_TREEWY" not in os.environ, reason="set BOLE_TREEWY to its file or folder")

FAKE = f"""
def {TREE}(*arguments, dot_bf16): return ("tree", arguments, dot_bf16)
def {CHAIN}(*arguments, dot_bf16): return ("chain", arguments, dot_bf16)
"""


def make_file(folder: Path, text: str = FAKE) -> str:
    (folder / FILE).write_text(text)
    return str(folder)


def draw(shape: str = "2,2,2", batch: int = 3, nodes: int = 5, dims: tuple[int, int] = (16, 32)):
    problem = Problem("verify", "gdn", *dims, 2, "bf16", "fp32", "raw", "fast", 16, 8, 0, 8)
    return make_verify_inputs(problem, 2, 4, batch, nodes, shape, layers=2, device="cpu")


def test_both_precisions_load_from_a_file_a_folder_or_a_checkout(tmp_path: Path) -> None:
    folder = tmp_path / "vllm/third_party/flash_linear_attention/ops"
    folder.mkdir(parents=True)
    make_file(folder)
    for path in (tmp_path, folder, folder / FILE):
        loaded, missing = load_peers(["treewy-bf16", "treewy-ieee"], PeerOptions(treewy=str(path)))
        assert not missing
        assert [(p.name, p.profile, p.commits) for p in loaded] == [
            ("treewy-bf16", "fast", True), ("treewy-ieee", "lossless", True)
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda d: None, "no --treewy PATH"),
        (lambda d: str(d), f"holds no {FILE}"),
        (lambda d: make_file(d, "import no_such_module"), "does not load: ModuleNotFoundError"),
        (lambda d: make_file(d, "x = 1"), f"has no {TREE}"),
        (lambda d: make_file(d, f"def {TREE}(): pass"), f"has no {CHAIN}"),
    ],
)
def test_what_cannot_load_is_listed_with_its_reason(tmp_path: Path, make, reason: str) -> None:
    loaded, missing = load_peers(["treewy-bf16"], PeerOptions(treewy=make(tmp_path)))
    assert loaded == []
    assert reason in missing["treewy-bf16"]


def test_ancestors_are_paths() -> None:
    assert ancestors([-1, 0, 0, 2]).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]


def test_it_is_called_with_masks_and_an_empty_path(tmp_path: Path) -> None:
    inputs = draw()
    bf16, ieee = load_peers(["treewy-bf16", "treewy-ieee"], PeerOptions(treewy=make_file(tmp_path)))[0]
    prepared = bf16.prepare(inputs, "2,2,2", 1 << 30)
    prepared.make_layer(1)()
    kind, given, rounded = prepared.output(1)
    assert (kind, rounded) == ("tree", True)
    q, _, v, a, _, _, _, strict, inclusive, values, keys, decays, paths, accepted, slots, pool, nodes, scale = given
    assert (q.shape, v.shape, a.shape) == ((15, 2, 16), (15, 4, 32), (15, 4))
    assert torch.equal(inclusive - strict, torch.eye(5))
    assert (values.shape, keys.shape, decays.shape) == ((6, 4, 5, 32), (6, 5, 4, 16), (6, 4, 5))
    assert paths[accepted].sum() == 0
    assert slots.tolist() == (inputs.slots + 1).tolist()
    assert torch.equal(pool[1:], inputs.layers[1].state)
    assert (nodes, scale) == (5, None)
    prepared.poison()
    assert (decays <= 0).all()
    assert prepared.workspace_bytes == 4 * (values.numel() + keys.numel() + decays.numel())
    prepared = ieee.prepare(draw("chain"), "chain", 1 << 30)
    prepared.make_layer(0)()
    kind, given, rounded = prepared.output(0)
    assert (kind, rounded, len(given)) == ("chain", False, 15)


def test_other_problems_are_refused(tmp_path: Path) -> None:
    (peer,), _ = load_peers(["treewy-bf16"], PeerOptions(treewy=make_file(tmp_path)))
    assert peer.refuses(Workload(64, 64, 16, 32)) is None
    assert "not of kda" in peer.refuses(Workload(1, 16, 4, 4, family="kda"))
    assert "pending" in peer.refuses(Workload(1, 4, 4, 4, pending=3))
    assert "at most 128" in peer.refuses(Workload(1, 129, 4, 4))
    assert "multiples of 32" in peer.refuses(Workload(1, 16, 4, 4, dv=40))
    with pytest.raises(PeerRefuses, match="one tree for all requests, and ragged"):
        peer.prepare(draw("ragged"), "ragged", 1 << 30)
    with pytest.raises(PeerUnavailable, match="are free"):
        peer.prepare(draw(), "2,2,2", 1000)
    inputs = draw()
    inputs.layers[0].raw.clear()
    with pytest.raises(PeerRefuses, match="raw gates"):
        peer.prepare(inputs, "2,2,2", 1 << 30)


NUMBERS = """
from verify_bench import oracle
from bole_codegen.measure import make_verify_inputs, relative_error
from bole_runtime.kernels.problem import Problem
from peers import PeerOptions, load_peers

(peer,), missing = load_peers(["treewy-ieee"], PeerOptions(treewy={treewy!r}))
assert not missing, missing
for function in peer._functions.values():
    function.__globals__["range"] = counted
problem = Problem("verify", "gdn", 32, 32, 2, "fp32", "fp32", "raw", "fast", 16, 8, 0, 8)
for shape, nodes in (("2,2,2", 9), ("binary", 18), ("chain", 6), ("star", 16)):
    inputs = make_verify_inputs(problem, 2, 4, 2, nodes, shape, layers=2, device="cpu", seed=7)
    prepared = peer.prepare(inputs, shape, 1 << 30)
    before = prepared.pools[0].clone()
    prepared.poison()
    prepared.make_layer(0)()
    error = relative_error(prepared.output(0), oracle.verify_outputs(inputs, 0))
    assert error < 3e-6, (shape, error)
    assert torch.equal(prepared.pools[0], before)  # The empty path.
    # The second call commits the first one's tree, and verifies from there.
    accepted = oracle.accepted_nodes(inputs, 3)
    states = oracle.committed_states(inputs, 0, accepted)
    prepared.accepted.copy_(accepted)
    prepared.make_layer(0)()
    folded = relative_error(prepared.pools[0][prepared.slots], states)
    assert folded < 1e-6, (shape, folded)
    print("right", shape, error, folded)
"""


@needs_treewy
@pytest.mark.slow
def test_the_real_kernels_agree_with_the_sequential_recurrence() -> None:
    assert interpreted(NUMBERS, treewy=os.environ["BOLE_TREEWY"]).count("right") == 4


@needs_treewy
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "nodes"),
    [("treewy-bf16", "2,2,2", 16), ("treewy-bf16", "chain", 4), ("treewy-ieee", "2,2,2", 16)],
)
def test_the_real_kernels_compile_for_an_h200(name: str, shape: str, nodes: int) -> None:
    (peer,), missing = load_peers([name], PeerOptions(treewy=os.environ["BOLE_TREEWY"]))
    assert not missing
    inputs = draw(shape, 2, nodes, (128, 128))
    prepared = peer.prepare(inputs, shape, 1 << 30)
    with compiled_only() as made:
        prepared.make_layer(0)()
    assert len(made) == prepared.launches
    assert made[0][1].asm["cubin"]
