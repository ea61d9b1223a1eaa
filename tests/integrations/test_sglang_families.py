"""Target verifications and commits of every family, called as SGLang calls them, against loops over its semantics."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bole_testing.sglang import LAYER_IDS, NODES, make_backend, make_batch
from bole_testing.sglang_layers import KINDS, LAYERS, SLOTS, check_rounds, make

from bole_runtime.integrations.sglang import kda, rounds
from bole_runtime.integrations.sglang.served import NotServed


@pytest.mark.parametrize("shape", ["tree", "chain"])
@pytest.mark.parametrize("track", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_verifications_and_their_commits(kind: str, shape: str, track: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kda, "write_gate_is_ready", lambda: kind == "kda ready")
    check_rounds(kind, shape, track)


@pytest.mark.parametrize("kind", ["gdn", "kda", "mamba2"])
def test_everything_else_is_the_engine_s_own(kind: str) -> None:
    layer = make(kind)
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_target_verify=lambda: False))
    seen: list[Any] = []
    x = torch.zeros(1)
    backend = SimpleNamespace()
    more = {"use_triton_causal_conv": True} if kind == "mamba2" else {"q": None}
    arguments = (layer, x, None, 3, batch) if kind == "mamba2" else (layer, batch, x, x, x)
    assert layer.hook(lambda *a, **k: seen.append((a, k)), backend, *arguments, **more) is None
    assert seen[0][0] == (backend, *arguments)
    assert more.items() <= seen[0][1].items()
    # Nothing was verified: a commit is not Bole's either.
    hybrid = SimpleNamespace(linear_attn_backend=backend)
    assert rounds.commit(lambda *a, **k: "own", hybrid, last_correct_step_indices=x) == "own"


def refused(kind: str, change: Callable[[Any, Any], None], match: str) -> None:
    layer = make(kind)
    backend = make_backend(torch.zeros(LAYERS, SLOTS, *layer.states), torch.zeros(LAYERS, SLOTS, layer.channels, 3))
    batch = make_batch(backend, torch.tensor([1, 2]), "chain")
    layer.draw(2)
    change(backend, batch)
    with pytest.raises(NotServed, match=match):
        layer.forward(backend, LAYER_IDS[0], batch)


@pytest.mark.parametrize("kind", ["gdn", "kda", "mamba2"])
def test_rounds_that_are_not_served_stop_the_engine(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kda, "write_gate_is_ready", lambda: False)

    def ragged(backend: Any, batch: Any) -> None:
        batch.spec_info.ragged_verify_layout = object()

    def ring(backend: Any, batch: Any) -> None:
        object.__setattr__(backend.req_to_token_pool.mamba_pool.mamba_cache, "replayssm_g", torch.zeros(1))

    def beside(backend: Any, batch: Any) -> None:
        backend.req_to_token_pool.ngram_pool = SimpleNamespace(enabled=True)

    def adaptive(backend: Any, batch: Any) -> None:
        backend._bole_rounds = SimpleNamespace(nodes=NODES + 1)

    refused(kind, ragged, "different numbers of draft tokens")
    refused(kind, ring, "ReplaySSM")
    refused(kind, beside, "ngram_pool: states beside")
    refused(kind, adaptive, "5 draft tokens after 6")


def test_what_kda_cannot_do_stops_the_engine() -> None:
    def fused_accept(backend: Any, batch: Any) -> None:
        backend.accept_lens_pool = torch.ones(3)
        batch.forward_mode.is_target_verify = lambda: False  # already in prefill, which would write to the snapshots

    refused("kda", fused_accept, "--linear-attn-verify-backend triton")
