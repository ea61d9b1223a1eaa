"""SGLang's ReplaySSM as peers: called as its engine calls it, over pending tokens too, with right numbers."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
from bole_testing.peers import compiled_only, interpreted
from peers import ChainedInputs, PeerOptions, PeerRefuses, PeerUnavailable, load_peers
from peers.sglang_fold import FOLD, FOLD_FILE
from peers.sglang_loader import ENTRY, KERNEL_FILE
from peers.sglang_replay import ADVANCE, CIRCULAR, RING_FILE, VERIFY, ring_length
from verify_bench import oracle, pending

from bole_codegen.measure import Workload, make_verify_inputs, relative_error
from bole_runtime import TreeBatch, verify
from bole_runtime.kernels.problem import Problem

needs_sglang = pytest.mark.skipif("BOLE_SGLANG" not in os.environ, reason="set BOLE_SGLANG to sglang 0.5.23")
NAMES = ["replayssm-ring", "replayssm-fold"]

RING = f"""
from sglang.kernels.ops.attention.fla.utils import is_tf32_supported
from sglang.srt.utils import is_gfx95_supported
CALLS = []
def {VERIFY}(dot_precision="tf32" if is_tf32_supported else "ieee", **given):
    CALLS.append({{**given, "written": given["write_pos"].clone(), "precision": dot_precision}})
    return given["out"]
def {ADVANCE}(*given, **options): CALLS.append((given, options))
def {CIRCULAR}(**given): CALLS.append(given)
"""
FOLDING = f"def {FOLD}(*given): return given"
SERIAL = f"def {ENTRY}(**given): return given"


def make_folder(folder: Path, **texts: str) -> str:
    files = {RING_FILE: RING, FOLD_FILE: FOLDING, KERNEL_FILE: SERIAL}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(texts.get(Path(name).stem, text))
    return str(folder)


def draw(tokens: int = 0, nodes: int = 4, state: str = "fp32", dim: int = 16, kind: str = "bf16", batch: int = 3):
    problem = Problem("verify", "gdn", dim, dim, 2, kind, state, "raw", "fast", 16, 8, 0, 8)
    inputs = make_verify_inputs(problem, 2, 4, batch, nodes, "chain", layers=2, device="cpu", seed=3)
    work = Workload(batch, nodes, 2, 4, dim, dim, kind, state, "bf16", "raw", pending=tokens)
    return pending.add_pending(inputs, work, seed=3)


def test_a_ring_holds_pending_tokens_and_two_windows() -> None:
    # SGLang folds once write_pos + 2 * window > length, in a ring of 16 by default.
    assert [ring_length(*x) for x in ((0, 4), (8, 4), (9, 4), (0, 8), (1, 8), (17, 8))] == [16, 16, 32, 16, 32, 64]


def test_the_ring_is_filled_window_by_window_and_then_verified(tmp_path: Path) -> None:
    (peer,), missing = load_peers(["replayssm-ring"], PeerOptions(sglang=make_folder(tmp_path)))
    assert not missing
    inputs = draw(6)
    prepared = peer.prepare(inputs, "chain", 1 << 30)
    with pytest.raises(KeyError):
        prepared.output(1)
    prepared.make_layer(1)()
    *filling, last = prepared._functions["verify"].__globals__["CALLS"]
    assert [(c["q"].shape[0], c["written"].tolist()) for c in filling] == [
        (12, [0] * 3), (12, [0] * 3), (6, [4] * 3), (6, [4] * 3)
    ]  # fmt: skip
    assert torch.equal(filling[0]["k"].view(3, 4, 2, 16), inputs.pending[0].k[:, :4])
    assert last["written"].tolist() == [6] * 3
    assert last["query_start_loc"].tolist() == [0, 4, 8, 12]
    assert (last["max_cache_len"], last["max_spec_len"], last["launch_mode"]) == (16, 4, "verify")
    assert last["d_cache"].shape == last["rawv_cache"].shape == (3, 4, 16, 16)
    assert last["k_cache"].dtype == torch.bfloat16
    assert last["beta_cache"] is None
    assert last["precision"] == ("tf32" if torch.cuda.is_available() else "ieee")
    assert prepared.output(1).shape == (3, 4, 4, 16)
    # A layer: updates and keys in two parts of two bytes, decays in four.
    assert prepared.workspace_bytes == 3 * 16 * (2 * 2 * (4 * 16 + 2 * 16) + 4 * 4)
    prepared.poison()
    ring = prepared._rings[0][0, 1, 0, :, 0]
    assert (ring == 1e3).sum() == 16 - 6


def test_its_commit_folds_every_ring(tmp_path: Path) -> None:
    (peer,), _ = load_peers(["replayssm-ring"], PeerOptions(sglang=make_folder(tmp_path)))
    prepared = peer.prepare(draw(6), "chain", 1 << 30)
    commit = prepared.make_commit([1, 3, 2])
    commit()
    (given, options), circular = prepared._functions["verify"].__globals__["CALLS"][-2:]
    written, _, _, taken, rows, length, window = given
    assert (written.tolist(), taken.tolist(), rows.tolist()) == ([0] * 3, [7, 9, 8], [0, 1, 2])
    assert (length, window, options["fold_every_commit"]) == (16, 4, True)
    assert circular["checkpoint_state"] is prepared.pools
    assert circular["accept_lens"].tolist() == [1, 3, 2]


def test_the_other_keeps_a_window_and_folds_it(tmp_path: Path) -> None:
    (peer,), missing = load_peers(["replayssm-fold"], PeerOptions(sglang=make_folder(tmp_path)))
    assert not missing
    inputs = draw()
    prepared = peer.prepare(inputs, "chain", 1 << 30)
    prepared.make_layer(1)()
    given = prepared._outputs[1]
    assert given["q"].shape == (1, 12, 2, 16)
    assert given["a"].shape == (12, 4)
    assert given["replayssm_rawk"].shape == (5, 2, 4, 16)
    assert given["cache_ring"] is True
    assert given["initial_state_source"].data_ptr() == prepared.pools[1].data_ptr()
    pools, rawv, _, decays, _, slots, accepted, length, heads = prepared.make_commit([1, 2, 4])()
    assert (pools.shape, rawv.shape, decays.shape) == ((2, 5, 4, 16, 16), (2, 5, 4, 4, 16), (2, 5, 4, 4))
    assert (slots.tolist(), accepted.tolist(), length, heads) == (inputs.slots.tolist(), [1, 2, 4], 4, 2)
    assert torch.equal(prepared.committed(0), inputs.layers[0].state[inputs.slots.long()])


@pytest.mark.parametrize(
    ("name", "texts", "reason"),
    [
        ("replayssm-ring", {Path(RING_FILE).stem: "x = 1"}, f"has no {VERIFY}"),
        ("replayssm-ring", {Path(RING_FILE).stem: f"def {VERIFY}(): pass"}, f"has no {ADVANCE}"),
        ("replayssm-fold", {Path(FOLD_FILE).stem: "import no_such_module"}, "does not load"),
        ("replayssm-fold", {Path(KERNEL_FILE).stem: "x = 1"}, f"has no {ENTRY}"),
    ],
)
def test_what_cannot_load_is_listed(tmp_path: Path, name: str, texts: dict[str, str], reason: str) -> None:
    assert reason in load_peers([name], PeerOptions(sglang=make_folder(tmp_path, **texts)))[1][name]
    assert "no --sglang PATH" in load_peers([name], PeerOptions())[1][name]


def test_other_problems_are_refused(tmp_path: Path) -> None:
    ring, fold = load_peers(NAMES, PeerOptions(sglang=make_folder(tmp_path)))[0]
    assert ring.refuses(Workload(64, 8, 16, 32, pending=8)) is None
    assert fold.refuses(Workload(64, 8, 16, 32)) is None
    assert fold.refuses(Workload(64, 8, 16, 32, pending=8)) == "has no pending chain"
    for peer in (ring, fold):
        assert "not of kda" in peer.refuses(Workload(1, 8, 4, 4, family="kda"))
        assert "at most 16" in peer.refuses(Workload(1, 17, 4, 4))
        for dims in ((64, 128), (96, 96), (16, 16)):
            assert "square heads" in peer.refuses(Workload(1, 4, 4, 4, *dims))
        with pytest.raises(PeerRefuses, match="chains only"):
            peer.prepare(draw(), "ragged", 1 << 30)
        with pytest.raises(PeerUnavailable, match="are free"):
            peer.prepare(draw(), "chain", 1000)
        assert peer.memory_bytes(Workload(8, 4, 16, 32)) > Workload(8, 4, 16, 32).state_bytes


@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_pending_tokens_are_the_same_for_the_oracle_and_for_bole(state: str) -> None:
    inputs = draw(6, state=state, kind="fp32")
    assert isinstance(inputs, ChainedInputs)
    assert inputs.workload.pending == 6
    start = pending.roots(inputs, {1})
    assert start.layers[0] is inputs.layers[0]
    chain = pending.chains(inputs)[1]
    assert chain.capacity == 8
    layer = inputs.layers[1]
    out, _ = verify(
        layer.q, layer.k, layer.v, gates=layer.raw, state=layer.state, slots=inputs.slots, pending=chain,
        tree=TreeBatch.from_parents(inputs.parents), out_dtype=torch.float32,
    )  # fmt: skip
    assert relative_error(out, oracle.verify_outputs(start, 1)) < 2e-6
    plain = draw(0)
    assert pending.chains(plain) is None
    assert pending.roots(plain, {0}) is plain


NUMBERS = """
from verify_bench import oracle, pending
from bole_codegen.measure import Workload, make_verify_inputs, relative_error
from bole_runtime.kernels.problem import Problem
from peers import PeerOptions, load_peers

class Index(int):
    def to(self, kind):
        return self

def indices(*bounds):  # A loop variable is a tensor, which the fold converts.
    return map(Index, counted(*bounds))

peers, missing = load_peers(["replayssm-ring", "replayssm-fold"], PeerOptions(sglang={sglang!r}))
assert not missing, missing
for peer in peers:
    for function in peer._functions.values():
        function.__globals__["range"] = indices
    for nodes, tokens in ((4, 0), (8, 0), (4, 6), (8, 13)):
        if tokens and peer.name == "replayssm-fold":
            continue
        problem = Problem("verify", "gdn", 32, 32, 2, "fp32", "fp32", "raw", "fast", 16, 8, 0, 8)
        inputs = make_verify_inputs(problem, 2, 4, 2, nodes, "chain", layers=2, device="cpu", seed=7)
        work = Workload(2, nodes, 2, 4, 32, 32, "fp32", "fp32", "fp32", "raw", pending=tokens)
        inputs = pending.add_pending(inputs, work, 7)
        start = pending.roots(inputs, {0, 1})
        prepared = peer.prepare(inputs, "chain", 1 << 30)
        prepared.poison()
        for index in (0, 1):
            prepared.make_layer(index)()
        error = max(relative_error(prepared.output(i), oracle.verify_outputs(start, i)) for i in (0, 1))
        assert error < 3e-6, (peer.name, nodes, tokens, error)
        accepted = oracle.accepted_nodes(inputs, 3)
        states = [oracle.committed_states(start, i, accepted) for i in (0, 1)]
        commit = prepared.make_commit(oracle.accepted_counts(inputs, accepted))
        commit()
        folded = max(relative_error(prepared.committed(i), states[i]) for i in (0, 1))
        assert folded < 2e-6, (peer.name, nodes, tokens, folded)
        commit()  # As a replayed graph does; nothing may be lost or grow without bound.
        assert prepared.committed(0).isfinite().all()
        print("right", peer.name, nodes, tokens, error, folded)
"""


@needs_sglang
@pytest.mark.slow
def test_the_real_kernels_agree_with_the_sequential_recurrence() -> None:
    assert interpreted(NUMBERS, sglang=os.environ["BOLE_SGLANG"]).count("right") == 6


@needs_sglang
@pytest.mark.slow
@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("nodes", [4, 8])
def test_the_real_kernels_compile_for_an_h200(nodes: int, state: str) -> None:
    peers, missing = load_peers(NAMES, PeerOptions(sglang=os.environ["BOLE_SGLANG"]))
    assert not missing
    for peer in peers:
        inputs = draw(6 if peer.name == "replayssm-ring" else 0, nodes, state, 128, batch=2)
        if peer.name == "replayssm-ring":
            # Its default on a GPU.
            peer._functions["verify"] = functools.partial(peer._functions["verify"], dot_precision="tf32")
        with compiled_only() as made:
            prepared = peer.prepare(inputs, "chain", 1 << 30)
            begun = len(made)
            prepared.make_layer(0)()
            assert len(made) - begun == prepared.launches
            prepared.make_commit([2, 3])()
        assert all(kernel.asm["cubin"] for _, kernel in made)
        assert len(made) - begun - 1 == (3 if peer.name == "replayssm-ring" else 1)
