"""The families besides Gated DeltaNet with one decay a head or none, on every variant, interpreted, against their own
float64 recurrence: padding nodes and slots full of NaN, a pending chain, captured factors, dense and packed trees,
ready and raw gates, sizes no tile divides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bole_testing.cases.base import dense_tree
from bole_testing.cases.checks import check_commit, check_verify
from bole_testing.cases.draws import Draw
from bole_testing.families import family_inputs, run_family_draw
from bole_testing.pins import Pin, pin, pinned_setup

from bole_runtime.families import FAMILIES, KERNEL_FAMILIES

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]

FP32, FP16 = torch.float32, torch.float16
TWO, THREE, ONE = (2, 4), (1, 3), (1, 1)
NAMES = [
    name for name in KERNEL_FAMILIES if name != "gdn" and FAMILIES[name].decay != "channel" and FAMILIES[name].plain
]
CALLS = [(name, mode) for name in NAMES for mode in FAMILIES[name].modes]


def draw(
    sizes: tuple[int, ...], heads: tuple[int, int], dims: tuple[int, int], *, packed: bool = False, pending: int = 0
) -> Draw:
    return Draw(sum(sizes), sizes, packed, heads, dims, "", 0.2, pending, True, True)


BLOCKS = {"row_block": 16, "prepare_warps": 1, "solve": "fp32"}
STEPS, PATH = {"variant": "steps"}, {"chunk": 16, "bv": 16}
PROBLEMS: dict[str, tuple[Pin, Draw]] = {
    "fused": (pin("fused", bv=16, commit=STEPS), draw((13, 9), TWO, (40, 20), packed=True)),
    "fused-pending": (pin("fused", orient="state", bv=16, commit=PATH), draw((5, 11), THREE, (20, 36), pending=5)),
    "two_stage": (pin("two_stage", bv=16, commit=PATH), draw((17, 6), TWO, (24, 20))),
    "two_stage-pending": (pin("two_stage", share=True, commit=STEPS), draw((13, 9), THREE, (16, 20), pending=5)),
    "two_stage-blocks": (pin("two_stage", share=True, **BLOCKS), draw((14, 19), TWO, (16, 16), packed=True)),
    "two_stage-share": (pin("two_stage", share=True, bv=16), draw((11, 14), TWO, (70, 20), pending=5)),
    "two_stage-walks": (
        pin("two_stage", programs=128, bv=16, orient="state"),
        draw((9, 14, 5), ONE, (40, 20), packed=True),
    ),
    "chunked": (pin("chunked", chunk=16, bv=16), draw((30, 21), ONE, (24, 40), pending=5)),
    "blocks": (pin("two_stage_blocks", bv=16), draw((70, 66), ONE, (24, 40), pending=5)),
    "four_stage": (pin("four_stage", bv=16), draw((70, 66), TWO, (24, 20), packed=True, pending=5)),
}
#: What only a solve has: its other form, and k rows that meet the state apart from q rows.
SOLVES: dict[str, tuple[Pin, Draw]] = {
    "fused-inverse": (pin("fused", bv=16, solve="fp32", commit=PATH), draw((11, 14), TWO, (40, 20))),
    "fused-apart": (pin("fused", bv=16, stack=False, commit=PATH), draw((13, 9), THREE, (20, 36), packed=True)),
    "two_stage-inverse": (pin("two_stage", bv=16, solve="fp32"), draw((17, 6), ONE, (24, 20), pending=5)),
}


def _calls() -> list[object]:
    found = []
    for i, (name, mode) in enumerate(CALLS):
        for j, label in enumerate(PROBLEMS):
            # Raw gates of Mamba2 have the most in them, and DeltaNet solves; of the others every other one will do.
            most = (name, mode) == ("mamba2", "raw") or FAMILIES[name].erase != "none"
            marks = [] if most or (i + j) % 2 == 0 else [pytest.mark.slow]
            found.append(pytest.param(name, mode, label, id=f"{name}-{mode}-{label}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "mode", "label"), _calls())
def test_variants(name: str, mode: str, label: str) -> None:
    pinned, problem = PROBLEMS[label]
    i, j = CALLS.index((name, mode)), list(PROBLEMS).index(label)
    # Element types, profiles and captures take turns: an interpreter is too slow for all of them everywhere.
    turn = (i + j // 2) % 4
    types = (FP32, FP16)[turn % 2], FP32 if turn != 3 else FP16
    setup = pinned_setup(pinned, "cpu", *types, ("lossless", "fast")[turn // 2])
    run_family_draw(setup, name, replace(problem, mode=mode, capture=(i + j) % 3 == 0))


@pytest.mark.parametrize("mode", ["ready", "raw"])
@pytest.mark.parametrize("label", SOLVES)
def test_solves_without_decay(label: str, mode: str) -> None:
    pinned, problem = SOLVES[label]
    turn = list(SOLVES).index(label) + (mode == "raw")
    setup = pinned_setup(pinned, "cpu", (FP32, FP16)[turn % 2], FP32, ("lossless", "fast")[turn // 2 % 2])
    run_family_draw(setup, "deltanet", replace(problem, mode=mode))


@pytest.mark.parametrize("pinned", [pin("fused", bv=32, commit=STEPS), pin("two_stage", bv=32, commit=STEPS)], ids=str)
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_repeated_keys_without_decay(beta: float, pinned: Pin) -> None:
    setup = pinned_setup(pinned, "cpu", FP16, FP32, "lossless")
    tree = dense_tree(setup, [list(range(-1, 31))])
    gates = {"beta": torch.full((1, 32, 2), beta)}
    inputs = family_inputs(setup, FAMILIES["deltanet"], tree, heads=(1, 2), gates=gates)
    inputs.k.copy_(inputs.k[:, :1].clone().expand_as(inputs.k))
    check_commit(setup, inputs, check_verify(setup, inputs), [31])


#: What a call may leave out or give besides.
OPTIONS = {
    "without_skip": ("mamba2", "ready", {"D": None}, {}),
    "without_bias": ("mamba2", "raw", {"dt_bias": None, "D": None}, {}),
    "limits": ("mamba2", "raw", {"dt_min": 0.02, "dt_max": 0.05}, {}),
    "normalizer": ("simple_gla", "raw", {"normalizer": 2.0}, {}),
    "normed": ("simple_gla", "ready", {}, {"qk_l2norm": True}),
    "normed_lightning": ("lightning", "ready", {}, {"qk_l2norm": True, "scale": 0.5}),
    "negative_eigenvalues": ("deltanet", "raw", {"beta_scale": 2.0}, {}),
    "unnormalised": ("deltanet", "ready", {}, {"qk_l2norm": False, "scale": 0.2}),
}


@pytest.mark.parametrize("pinned", [pin("fused", bv=16, commit=STEPS), pin("two_stage", bv=16, commit=PATH)], ids=str)
@pytest.mark.parametrize("label", OPTIONS)
def test_options(label: str, pinned: Pin) -> None:
    name, mode, changes, options = OPTIONS[label]
    setup = pinned_setup(pinned, "cpu", (FP32, FP16)[label.startswith("normed")], FP32, "lossless")
    tree = dense_tree(setup, [[-1, 0, 0, 1, 2], [-1, 0, -2, 1, 3]])
    inputs = family_inputs(setup, FAMILIES[name], tree, dims=(24, 20), mode=mode, slots=[1, 2], pool_slots=3)
    gates = {n: t for n, t in {**inputs.gates, **changes}.items() if t is not None}
    inputs = inputs.replace(gates=gates, options={**inputs.options, **options})
    check_commit(setup, inputs, check_verify(setup, inputs), [3, 4])


def test_small_steps_keep_their_digits() -> None:
    # softplus of -12 is 6e-6: an error that is small for a log-decay is not for what multiplies x.
    setup = pinned_setup(pin("fused", bv=16, commit=STEPS), "cpu", FP32, FP32, "fast")
    tree = dense_tree(setup, [[-1, 0, 0, 1, 2]])
    inputs = family_inputs(
        setup, FAMILIES["mamba2"], tree, dims=(16, 16), mode="raw", gates={"dt_bias": torch.full((4,), -12.0)}
    )
    gates = {n: t for n, t in inputs.gates.items() if n != "D"}
    inputs = inputs.replace(gates=gates, state=torch.zeros_like(inputs.state))
    check_commit(setup, inputs, check_verify(setup, inputs), [3])
