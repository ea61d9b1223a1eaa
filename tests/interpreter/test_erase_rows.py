"""Families that erase with rows of their own (another key, k times a gate, the state before decay), interpreted: their
own float64 recurrence, with padding full of NaN, pending chains, captured factors, packed trees, raw gates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bole_testing.actions import check_actions
from bole_testing.cases.base import Inputs, Setup, dense_tree
from bole_testing.cases.checks import check_commit, check_verify
from bole_testing.cases.draws import Draw
from bole_testing.families import family_inputs, repeat_key, run_family_draw
from bole_testing.pins import Pin, pin, pinned_setup

import bole_runtime
from bole_runtime import gpus
from bole_runtime.families import FAMILIES, KERNEL_FAMILIES
from bole_runtime.kernels import Problem
from bole_runtime.kernels.variants import get_variant, served

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]

FP32, FP16 = torch.float32, torch.float16
NAMES = [name for name in KERNEL_FAMILIES if not FAMILIES[name].plain]
STEPS = {"variant": "steps"}
SLICES = pin("slices", bv=16, commit=STEPS)
BRANCHED = [-1, 0, 0, 1, 2, 3, 4, 5, 5, 6, 9, 10, 11, 12, 2, 14]


def draw(
    sizes: tuple[int, ...], heads: tuple[int, int], dims: tuple[int, int], *, packed: bool = False, pending: int = 0
) -> Draw:
    return Draw(sum(sizes), sizes, packed, heads, dims, "", 0.2, pending, True, True)


PROBLEMS: dict[str, tuple[Pin, Draw]] = {
    "packed": (SLICES, draw((13, 9), (1, 2), (40, 20), packed=True)),
    "pending": (pin("slices", orient="state", bv=16, commit=STEPS), draw((5, 11), (1, 3), (20, 20), pending=5)),
    "many": (pin("slices", bv=32, commit=STEPS), draw((30, 19), (1, 1), (24, 40))),
}


@pytest.mark.parametrize("mode", ["ready", "raw"])
@pytest.mark.parametrize("label", PROBLEMS)
@pytest.mark.parametrize("name", NAMES)
def test_random_trees(name: str, label: str, mode: str) -> None:
    pinned, problem = PROBLEMS[label]
    # Element types, profiles and captures take turns: an interpreter is too slow for all of them everywhere.
    turn = NAMES.index(name) + list(PROBLEMS).index(label) + 2 * (mode == "raw")
    types = (FP32, FP16)[turn % 2], FP32 if turn % 4 != 3 else FP16
    setup = pinned_setup(pinned, "cpu", *types, ("lossless", "fast")[turn // 2 % 2])
    run_family_draw(setup, name, replace(problem, mode=mode, capture=turn % 3 != 0))


GATES: dict[str, list[float]] = {
    "mixed": [0.0, -3.0, -6.0, -20.0, -50.0, -1000.0],
    "one closed": [-0.01] * 12 + [-torch.inf],
    "near the limit": [-5.0, -5.3, -4.9, 0.0],
}


@pytest.mark.parametrize("label", GATES)
@pytest.mark.parametrize("name", NAMES)
def test_strong_gates(name: str, label: str) -> None:
    fast = (NAMES.index(name) + list(GATES).index(label)) % 3 == 2
    setup = pinned_setup(SLICES, "cpu", (FP32, FP16)[fast], FP32, ("lossless", "fast")[fast])
    inputs = family_inputs(setup, FAMILIES[name], dense_tree(setup, [BRANCHED]), heads=(1, 2), dims=(20, 16))
    values, g = torch.tensor(GATES[label]), inputs.gates["g"]
    g.copy_(values[torch.randint(0, len(values), g.shape, generator=torch.Generator().manual_seed(len(label)))])
    check_commit(setup, inputs, check_verify(setup, inputs), [13])


@pytest.mark.parametrize("name", NAMES)
def test_one_huge_gate_costs_nothing_below_it(name: str) -> None:
    setup = pinned_setup(SLICES, "cpu", FP32, FP32, "lossless")
    inputs = family_inputs(setup, FAMILIES[name], dense_tree(setup, [list(range(-1, 15))]), heads=(1, 1))
    inputs.gates["g"].fill_(-0.0123)
    inputs.gates["g"][:, 1] = -1000.0
    check_commit(setup, inputs, check_verify(setup, inputs), [15])


def repeated(setup: Setup, name: str, nodes: int, strength: float) -> Inputs:
    """Return a chain of one key that erases what is at that key, as strongly as given."""
    tree = dense_tree(setup, [list(range(-1, nodes - 1))])
    inputs = family_inputs(setup, FAMILIES[name], tree, heads=(1, 1), dims=(24, 16))
    repeat_key(inputs, strength)
    return inputs


@pytest.mark.parametrize("strength", [1.0, 1.9, 2.0])
@pytest.mark.parametrize("name", NAMES)
def test_repeated_keys(name: str, strength: float) -> None:
    setup = pinned_setup(SLICES, "cpu", FP16, FP32, "lossless")
    inputs = repeated(setup, name, 32, strength)
    check_commit(setup, inputs, check_verify(setup, inputs), [31])


#: What a call may leave out or give besides.
OPTIONS = {
    "comba-scale": ("comba", "raw", {"beta_scale": 2.0}, {}),
    "comba-unnormalised": ("comba", "ready", {}, {"qk_l2norm": False, "scale": 0.2}),
    "gdn2-scale": ("gdn2", "raw", {"erase_scale": 2.0, "dt_bias": None}, {}),
    "gdn2-unnormalised": ("gdn2", "ready", {}, {"qk_l2norm": False, "scale": 0.2}),
    "rwkv7-normed": ("rwkv7", "ready", {}, {"qk_l2norm": True, "scale": 0.5}),
}


@pytest.mark.parametrize("label", OPTIONS)
def test_options(label: str) -> None:
    name, mode, changes, options = OPTIONS[label]
    setup = pinned_setup(SLICES, "cpu", FP32, FP32, "lossless")
    tree = dense_tree(setup, [[-1, 0, 0, 1, 2], [-1, 0, -2, 1, 3]])
    inputs = family_inputs(
        setup, FAMILIES[name], tree, heads=(1, 2), dims=(24, 20), mode=mode, slots=[1, 2], pool_slots=3
    )
    if "unnormalised" in label:
        inputs.k.mul_(0.3)
    gates = {n: t for n, t in {**inputs.gates, **changes}.items() if t is not None}
    inputs = inputs.replace(gates=gates, options={**inputs.options, **options})
    check_commit(setup, inputs, check_verify(setup, inputs), [3, 4])


@pytest.mark.parametrize("mode", ["ready", "raw"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_too_large_to_square(name: str, mode: str) -> None:
    setup = pinned_setup(SLICES, "cpu", FP32, FP32, "lossless")
    inputs = family_inputs(setup, FAMILIES[name], dense_tree(setup, [BRANCHED]), heads=(1, 2), mode=mode)
    if FAMILIES[name].qk_l2norm:
        inputs.k[:, 3].mul_(1e30)
        inputs.q[:, 4].mul_(1e30)
    for gate in ("p", "kk"):
        if gate in inputs.gates:
            inputs.gates[gate][:, 2].mul_(1e30)
            inputs.gates[gate][:, 5].mul_(1e-9)
    check_commit(setup, inputs, check_verify(setup, inputs), [13])


@pytest.mark.parametrize("mode", ["ready", "raw"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_do_what_their_action_says(name: str, mode: str) -> None:
    setup = Setup(bole_runtime.verify, bole_runtime.commit, torch.device("cpu"), FP32, FP32, "lossless")
    variant = get_variant("commit", "steps").config({"bv": 32, "warps": 1, "tiles": 1})
    assert check_actions(setup, 2, mode=mode, variant=variant, family=name) == {0, 1, 2, 3}


@pytest.mark.parametrize("name", NAMES)
def test_other_variants_and_more_rows_are_refused(name: str) -> None:
    problem = Problem("verify", name, 32, 32, 1, "fp16", "fp32", "ready", "fast", 32, 32, 0, 1)
    others = [("verify", v) for v in ("fused", "two_stage", "chunked")] + [("commit", v) for v in ("path", "blocks")]
    for op, variant in others:
        reason = get_variant(op, variant).applies(problem.replace(op=op))
        assert reason in (
            f"family {name!r} has a decay a key channel, which this variant does not take",
            f"family {name!r} erases with rows of its own, which this variant does not take",
        )
    assert get_variant("verify", "slices").applies(problem) is None
    assert served(problem)
    reason = get_variant("verify", "slices").applies(problem.replace(pending=16))
    assert reason == "ptxas 12.8 (Triton 3.6) miscompiles most of these kernels of 64 rows"
    assert served(problem.replace(nodes=512, pending=64))
    assert served(problem.replace(op="commit", nodes=512))
    slices, limits = get_variant("verify", "slices"), gpus.get("h200").limits()
    config = slices.default(problem, limits)
    by_depth = slices.config({**config.as_dict(), "solve": "fp16"})
    assert slices.check(problem, config, limits) is None
    assert "products of k with k only" in str(slices.check(problem.replace(qk_l2norm=True), by_depth, limits))
