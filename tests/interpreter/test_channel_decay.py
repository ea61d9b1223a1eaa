"""Families with a decay a key channel, interpreted, against their own float64 recurrence: padding nodes and slots full
of NaN, a pending chain, captured factors, dense and packed trees, ready and raw gates, sizes no tile divides."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from bole_testing.actions import check_actions
from bole_testing.cases.base import Setup, dense_tree
from bole_testing.cases.checks import check_commit, check_verify
from bole_testing.cases.draws import Draw
from bole_testing.families import family_inputs, run_family_draw
from bole_testing.pins import Pin, pin, pinned_setup

import bole_runtime
from bole_runtime import backend_choice, backends
from bole_runtime.families import FAMILIES, KERNEL_FAMILIES
from bole_runtime.kernels import Problem
from bole_runtime.kernels.variants import get_variant, served

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]

FP32, FP16 = torch.float32, torch.float16
NAMES = [name for name in KERNEL_FAMILIES if FAMILIES[name].decay == "channel" and FAMILIES[name].plain]
STEPS = {"variant": "steps"}
FUSED = pin("slices", bv=16, commit=STEPS)
#: Twice as many value heads as key heads, three times, and as many.
TWO, THREE, ONE = (2, 4), (1, 3), (1, 1)


def draw(
    sizes: tuple[int, ...], heads: tuple[int, int], dims: tuple[int, int], *, packed: bool = False, pending: int = 0
) -> Draw:
    return Draw(sum(sizes), sizes, packed, heads, dims, "", 0.2, pending, True, True)


PROBLEMS: dict[str, tuple[Pin, Draw]] = {
    "packed": (FUSED, draw((13, 9), TWO, (40, 20), packed=True)),
    "pending": (pin("slices", orient="state", bv=16, commit=STEPS), draw((5, 11), THREE, (20, 36), pending=5)),
    "inverse": (pin("slices", bv=16, solve="fp32", commit=STEPS), draw((11, 3), ONE, (100, 24))),
    "two kernels": (pin("two_stage_slices", bv=16, commit=STEPS), draw((13, 9), TWO, (40, 20), packed=True)),
    "two kernels, pending": (
        pin("two_stage_slices", slice=16, orient="state", bv=16, commit=STEPS),
        draw((5, 11), THREE, (20, 36), pending=5),
    ),
    "two kernels, walk": (
        pin("two_stage_slices", programs=128, prefetch=False, bv=16, commit=STEPS),
        draw((11, 3), TWO, (24, 40)),
    ),
    "two kernels, many": (pin("two_stage_slices", bv=32, slice=32, commit=STEPS), draw((50, 33), ONE, (72, 24))),
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


BRANCHED = [-1, 0, 0, 1, 2, 3, 4, 5, 5, 6, 9, 10, 11, 12, 2, 14]
GATES: dict[str, list[float]] = {
    "side by side": [0.0, -50.0],
    "mixed": [0.0, -3.0, -6.0, -20.0, -50.0, -1000.0],
    "one closed": [-0.01] * 12 + [-torch.inf],
    "near the limit": [-5.0, -5.3, -4.9, 0.0],
}


@pytest.mark.parametrize("precision", ["lossless", "fast"])
@pytest.mark.parametrize("label", GATES)
@pytest.mark.parametrize("name", NAMES)
def test_strong_gates(name: str, label: str, precision: str) -> None:
    setup = pinned_setup(FUSED, "cpu", (FP32, FP16)[precision == "fast"], FP32, precision)
    inputs = family_inputs(setup, FAMILIES[name], dense_tree(setup, [BRANCHED, list(range(-1, 15))]))
    values, g = torch.tensor(GATES[label]), inputs.gates["g"]
    pick = torch.randint(0, len(values), g.shape, generator=torch.Generator().manual_seed(len(label)))
    g.copy_(values[pick])
    if label == "side by side":
        g.zero_()
        g[..., ::2] = -50.0
        g[:, 7, :, 5] = -1000.0
    check_commit(setup, inputs, check_verify(setup, inputs), [13, 14])


@pytest.mark.parametrize("name", NAMES)
def test_one_huge_gate_costs_nothing_below_it(name: str) -> None:
    setup = pinned_setup(FUSED, "cpu", FP32, FP32, "lossless")
    inputs = family_inputs(setup, FAMILIES[name], dense_tree(setup, [list(range(-1, 15))]))
    inputs.gates["g"].fill_(-0.0123)
    inputs.gates["g"][:, 1] = -1000.0
    check_commit(setup, inputs, check_verify(setup, inputs), [15])


@pytest.mark.parametrize("gate", [-0.999, -1.25, -1.3])
def test_gates_that_add_up(gate: float) -> None:
    # Down 64 nodes: sums of fractions alone, the widest range of a common reference, and one beyond it.
    setup = pinned_setup(pin("two_stage_slices", bv=16, commit=STEPS), "cpu", FP32, FP32, "lossless")
    tree = dense_tree(setup, [list(range(-1, 63))])
    inputs = family_inputs(
        setup, FAMILIES["kda"], tree, heads=(1, 1), dims=(64, 16), gates={"g": torch.full((1, 64, 1, 64), gate)}
    )
    check_commit(setup, inputs, check_verify(setup, inputs), [63])


def test_channels_too_large_for_a_common_reference() -> None:
    setup = pinned_setup(FUSED, "cpu", FP32, FP32, "lossless")
    inputs = family_inputs(setup, FAMILIES["gla"], dense_tree(setup, [BRANCHED]))
    inputs.gates["g"].fill_(-9.0)
    inputs.k[..., 3].mul_(1e28)
    inputs.q[..., 3].mul_(1e-28)
    inputs.state[..., 3].zero_()
    check_verify(setup, inputs)


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_repeated_keys(beta: float) -> None:
    setup = pinned_setup(FUSED, "cpu", FP16, FP32, "lossless")
    gates = {"beta": torch.full((1, 32, 2), beta), "g": torch.zeros(1, 32, 2, 24)}
    tree = dense_tree(setup, [list(range(-1, 31))])
    inputs = family_inputs(setup, FAMILIES["kda"], tree, heads=(1, 2), gates=gates)
    inputs.k.copy_(inputs.k[:, :1].clone().expand_as(inputs.k))
    check_commit(setup, inputs, check_verify(setup, inputs), [31])


#: What a call may leave out or give besides.
OPTIONS = {
    "bounded": ("kda", "raw", {"lower_bound": -5.0, "beta_scale": 2.0}, {}),
    "without_bias": ("kda", "raw", {"dt_bias": None}, {}),
    "unnormalised": ("kda", "ready", {}, {"qk_l2norm": False, "scale": 0.2}),
    "normalizer": ("gla", "raw", {"normalizer": 2.0}, {}),
    "normed": ("gla", "ready", {}, {"qk_l2norm": True}),
}


@pytest.mark.parametrize("label", OPTIONS)
def test_options(label: str) -> None:
    name, mode, changes, options = OPTIONS[label]
    setup = pinned_setup(FUSED, "cpu", FP32, FP32, "lossless")
    tree = dense_tree(setup, [[-1, 0, 0, 1, 2], [-1, 0, -2, 1, 3]])
    inputs = family_inputs(setup, FAMILIES[name], tree, dims=(24, 20), mode=mode, slots=[1, 2], pool_slots=3)
    gates = {n: t for n, t in {**inputs.gates, **changes}.items() if t is not None}
    inputs = inputs.replace(gates=gates, options={**inputs.options, **options})
    check_commit(setup, inputs, check_verify(setup, inputs), [3, 4])


def test_keys_too_large_to_square() -> None:
    setup = pinned_setup(FUSED, "cpu", FP32, FP32, "lossless")
    inputs = family_inputs(setup, FAMILIES["kda"], dense_tree(setup, [BRANCHED]))
    inputs.k[:, 3].mul_(1e30)
    inputs.q[:, 4].mul_(1e30)
    check_commit(setup, inputs, check_verify(setup, inputs), [13])


@pytest.mark.parametrize("how", ["steps", "blocks"])
@pytest.mark.parametrize("mode", ["ready", "raw"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_do_what_their_action_says(name: str, mode: str, how: str) -> None:
    setup = Setup(bole_runtime.verify, bole_runtime.commit, torch.device("cpu"), FP32, FP32, "lossless")
    sizes = {"bv": 32, "warps": 1} | ({"block": 2} if how == "blocks" else {})
    variant = get_variant("commit", how).config(sizes)
    assert check_actions(setup, 2, mode=mode, variant=variant, family=name) == {0, 1, 2, 3}


def test_other_variants_and_more_rows_are_refused() -> None:
    problem = Problem("verify", "kda", 64, 32, 1, "fp16", "fp32", "ready", "fast", 64, 64, 0, 1)
    for op, name in (("verify", "fused"), ("verify", "two_stage"), ("verify", "chunked"), ("commit", "path")):
        reason = get_variant(op, name).applies(problem.replace(op=op))
        assert reason == "family 'kda' has a decay a key channel, which this variant does not take"
    assert "miscompiles most of these kernels of 64 rows" in str(get_variant("verify", "slices").applies(problem))
    assert get_variant("verify", "slices").applies(problem.replace(nodes=32)) is None
    assert get_variant("verify", "two_stage_slices").applies(problem.replace(dk=32)) is None
    assert served(problem)
    more = get_variant("verify", "two_stage_slices").applies(problem.replace(pending=16))
    assert more == "R of 128 rows does not fit a program"
    assert served(problem.replace(nodes=512, pending=64))
    assert served(problem.replace(op="commit", nodes=512))


def test_what_no_variant_takes_falls_back_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(bole_runtime.verify, bole_runtime.commit, torch.device("cpu"), FP32, FP32, "lossless")
    inputs = family_inputs(setup, FAMILIES["kda"], dense_tree(setup, [list(range(-1, 69))]), dims=(16, 16))
    module = importlib.import_module("bole_runtime.backends.triton_backend.verify")  # its package names the function
    monkeypatch.setattr(module, "served", lambda _: False)
    with pytest.raises(NotImplementedError, match="no Triton kernels for 128 nodes and 0 pending tokens"):
        check_verify(setup, inputs)
    triton = backends.get_backend(setup.device, FAMILIES["kda"])
    assert triton.name == "triton"
    monkeypatch.setattr("bole_runtime.api.get_backend", lambda *_: triton)
    monkeypatch.setattr(backend_choice, "_forced", None)
    monkeypatch.setattr(backends, "_warned", set())
    with pytest.warns(UserWarning, match="for 128 nodes and 0 pending tokens: it runs on the torch backend"):
        factors = check_verify(setup, inputs)
    check_commit(setup, inputs, factors, [68])
