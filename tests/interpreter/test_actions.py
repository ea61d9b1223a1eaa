"""Rows of one commit that commit, flush, append or do nothing, on every commit variant."""

from __future__ import annotations

import pytest
import torch
from bole_testing.actions import check_actions
from bole_testing.cases.base import Setup

import bole_runtime
from bole_runtime.kernels.variants import get_variant

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]

VARIANTS = {
    "steps": get_variant("commit", "steps").config({"bv": 32, "warps": 1, "tiles": 1}),
    "blocks": get_variant("commit", "blocks").config({"bv": 32, "block": 4, "warps": 1}),
    "path": get_variant("commit", "path").config(
        {"bv": 32, "step": 16, "chunk": 16, "dot": "tf32x3", "slice": 32, "registers": 168, "warps": 1}
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_do_what_their_action_says(variant: str) -> None:
    mode, dtype, seed = {
        "steps": ("raw", torch.float16, 2),
        "blocks": ("raw", torch.float16, 2),
        "path": ("ready", torch.float32, 4),
    }[variant]
    setup = Setup(bole_runtime.verify, bole_runtime.commit, torch.device("cpu"), dtype, torch.float32, "lossless")
    assert check_actions(setup, seed, mode=mode, variant=VARIANTS[variant]) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("family", "mode", "without", "variant"),
    [
        ("mamba2", "raw", ("dt_bias",), "steps"),
        ("mamba2", "raw", ("D",), "path"),
        ("mamba2", "raw", (), "blocks"),
        ("lightning", "ready", (), "blocks"),
        ("linear_attention", "ready", (), "blocks"),
        ("deltanet", "raw", (), "blocks"),
        ("lightning", "ready", (), "steps"),
        ("simple_gla", "raw", (), "path"),
        ("linear_attention", "ready", (), "steps"),
        ("deltanet", "raw", (), "steps"),
        ("deltanet", "ready", (), "path"),
    ],
)
def test_layers_of_other_families(family: str, mode: str, without: tuple[str, ...], variant: str) -> None:
    setup = Setup(
        bole_runtime.verify, bole_runtime.commit, torch.device("cpu"), torch.float32, torch.float32, "lossless"
    )
    options = {"mode": mode, "variant": VARIANTS[variant], "family": family, "without": without}
    assert check_actions(setup, 2, **options) == {0, 1, 2, 3}
