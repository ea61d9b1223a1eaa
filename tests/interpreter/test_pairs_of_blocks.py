"""A decay a key channel, and erase rows of their own, over more rows than a tile holds: by pairs of row blocks,
interpreted, against the float64 recurrence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bole_testing.cases.base import Inputs, Setup, dense_tree
from bole_testing.cases.checks import check_commit, check_verify
from bole_testing.cases.draws import Draw
from bole_testing.families import family_inputs, repeat_key, run_family_draw
from bole_testing.pins import Pin, pin, pinned_setup

from bole_runtime import gpus
from bole_runtime.families import FAMILIES, KERNEL_FAMILIES
from bole_runtime.kernels import Problem, default_config
from bole_runtime.kernels.variants import get_variant

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]

FP32, FP16 = torch.float32, torch.float16
CHANNEL = [name for name in KERNEL_FAMILIES if FAMILIES[name].decay == "channel" and FAMILIES[name].plain]
ERASING = [name for name in KERNEL_FAMILIES if not FAMILIES[name].plain]
NAMES = CHANNEL + ERASING
STEPS = {"variant": "steps"}
BLOCKS = pin("three_stage_blocks", bv=16, commit=STEPS)
LARGE = pin(
    "three_stage_blocks", bv=16, row_block=32, slice=16, prepare_warps=2, sum_slice=32, sum_warps=4, commit=STEPS
)
SMALL = pin(
    "three_stage_blocks", bv=16, row_block=16, slice=16, sum_slice=16, prepare_warps=1, sum_warps=1, commit=STEPS
)


def rows_of(name: str) -> int:
    """Return the rows of the smallest problems of a family that this variant takes, none of them padding."""
    return 64 if name in ERASING else 128


def bushy(nodes: int) -> list[int]:
    """Return a tree whose nodes have ancestors in the block before, in several, and in none; with padding."""
    parents = [-1, *[i // 3 for i in range(nodes // 2)]]
    parents += [*range(nodes // 2 - 5, nodes // 2 + 6), -1, nodes // 2 + 12, 7, nodes // 2 + 14, -2]
    return parents + [len(parents) - 3 - (i % 2) * 40 for i in range(nodes - len(parents))]


def draw(
    sizes: tuple[int, ...], heads: tuple[int, int], dims: tuple[int, int], *, packed: bool = False, pending: int = 0
) -> Draw:
    return Draw(sum(sizes), sizes, packed, heads, dims, "", 0.2, pending, True, True)


PROBLEMS: dict[str, tuple[Pin, Draw, Draw]] = {
    "packed": (
        LARGE,
        draw((75, 41), (1, 2), (40, 20), packed=True),
        draw((41, 35), (1, 2), (40, 20), packed=True),
    ),
    "pending": (SMALL, draw((50, 61), (1, 1), (20, 36), pending=21), draw((19, 30), (1, 3), (20, 20), pending=21)),
    "many": (BLOCKS, draw((150,), (1, 1), (24, 16)), draw((75,), (1, 1), (24, 40))),
}


@pytest.mark.parametrize("mode", ["ready", "raw"])
@pytest.mark.parametrize("label", PROBLEMS)
@pytest.mark.parametrize("name", NAMES)
def test_random_trees(name: str, label: str, mode: str) -> None:
    pinned, problem, smaller = PROBLEMS[label]
    problem = smaller if name in ERASING else problem
    # Element types, profiles and captures take turns: an interpreter is too slow for all of them everywhere.
    turn = NAMES.index(name) + list(PROBLEMS).index(label) + 2 * (mode == "raw")
    types = (FP32, FP16)[turn % 2], FP32 if turn % 4 != 3 else FP16
    setup = pinned_setup(pinned, "cpu", *types, ("lossless", "fast")[turn // 2 % 2])
    run_family_draw(setup, name, replace(problem, mode=mode, capture=turn % 3 != 0))


GATES: dict[str, list[float]] = {
    "side by side": [0.0, -50.0],
    "mixed": [0.0, -3.0, -6.0, -20.0, -50.0, -1000.0],
    "one closed": [-0.01] * 60 + [-torch.inf],
    "near the limit": [-3.7, -4.1, -2.5, 0.0],
    "weak": [-0.4, -0.7, -0.999],
}


def inputs_of(setup: Setup, parents: list[int], family: str, **more: object) -> Inputs:
    tree = dense_tree(setup, [parents])
    return family_inputs(setup, FAMILIES[family], tree, heads=(1, 1), dims=(24, 16), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("label", GATES)
@pytest.mark.parametrize("name", NAMES)
def test_strong_gates(name: str, label: str) -> None:
    rows, turn = rows_of(name), NAMES.index(name) + list(GATES).index(label)
    fast, chain = turn % 3 == 2, turn % 2 == 0
    setup = pinned_setup((BLOCKS, SMALL)[turn % 5 == 4], "cpu", (FP32, FP16)[fast], FP32, ("lossless", "fast")[fast])
    inputs = inputs_of(setup, list(range(-1, rows - 1)) if chain else bushy(rows), name)
    values, g = torch.tensor(GATES[label]), inputs.gates["g"]
    g.copy_(values[torch.randint(0, len(values), g.shape, generator=torch.Generator().manual_seed(len(label)))])
    if label == "side by side":
        g.zero_()
        g[..., ::2] = -50.0
        g[:, 40, ..., -1:] = -1000.0
    check_commit(setup, inputs, check_verify(setup, inputs), [43])


@pytest.mark.parametrize("name", NAMES)
def test_one_huge_gate_costs_nothing_below_it(name: str) -> None:
    setup = pinned_setup(BLOCKS, "cpu", FP32, FP32, "lossless")
    inputs = inputs_of(setup, list(range(-1, rows_of(name) - 1)), name)
    inputs.gates["g"].fill_(-0.0123)
    inputs.gates["g"][:, 1] = -1000.0
    check_verify(setup, inputs)


@pytest.mark.parametrize("gate", [-1.3, -2.55, -2.65])
def test_gates_that_add_up(gate: float) -> None:
    # Down a chain: sums of fractions alone, the widest range within a block, and one beyond it.
    setup = pinned_setup(BLOCKS, "cpu", FP32, FP32, "lossless")
    gates = {"g": torch.full((1, 128, 1, 24), gate)}
    check_verify(setup, inputs_of(setup, list(range(-1, 127)), "kda", gates=gates))


def test_channels_too_large_for_a_common_reference() -> None:
    setup = pinned_setup(BLOCKS, "cpu", FP32, FP32, "lossless")
    inputs = inputs_of(setup, bushy(128), "gla")
    inputs.gates["g"].fill_(-2.0)
    inputs.k[..., 3].mul_(1e28)
    inputs.q[..., 3].mul_(1e-28)
    inputs.state[..., 3].zero_()
    check_verify(setup, inputs)


@pytest.mark.parametrize("mode", ["ready", "raw"])
@pytest.mark.parametrize("name", [n for n in NAMES if n != "gla"])
def test_rows_too_large_to_square(name: str, mode: str) -> None:
    setup = pinned_setup(BLOCKS, "cpu", FP32, FP32, ("lossless", "fast")[mode == "raw"])
    inputs = inputs_of(setup, bushy(rows_of(name)), name, mode=mode)
    if FAMILIES[name].qk_l2norm:
        inputs.k[:, 3].mul_(1e30)
        inputs.k[:, 35].mul_(1e15)
        inputs.q[:, 4].mul_(1e30)
        inputs.q[:, 50].mul_(1e36)
    for gate in ("p", "kk"):
        if gate in inputs.gates:
            inputs.gates[gate][:, 2].mul_(1e30)
            inputs.gates[gate][:, 45].mul_(1e-9)
    check_commit(setup, inputs, check_verify(setup, inputs), [43])


@pytest.mark.parametrize("precision", ["lossless", "fast"])
@pytest.mark.parametrize("strength", [1.0, 1.9, 2.0])
@pytest.mark.parametrize("name", [n for n in NAMES if n != "gla"])
def test_repeated_keys(name: str, strength: float, precision: str) -> None:
    setup = pinned_setup(BLOCKS, "cpu", FP16, FP32, precision)
    inputs = inputs_of(setup, list(range(-1, rows_of(name) - 1)), name)
    repeat_key(inputs, strength)
    check_verify(setup, inputs, sequential=True)


#: What a call may leave out or give besides.
OPTIONS = {
    "kda-bounded": ("kda", "raw", {"lower_bound": -5.0, "beta_scale": 2.0}, {}),
    "kda-without_bias": ("kda", "raw", {"dt_bias": None}, {}),
    "kda-unnormalised": ("kda", "ready", {}, {"qk_l2norm": False, "scale": 0.2}),
    "gla-normed": ("gla", "ready", {}, {"qk_l2norm": True}),
    "comba-unnormalised": ("comba", "raw", {"beta_scale": 2.0}, {"qk_l2norm": False, "scale": 0.2}),
    "gdn2-unnormalised": ("gdn2", "raw", {"dt_bias": None}, {"qk_l2norm": False, "scale": 0.2}),
    "rwkv7-normed": ("rwkv7", "ready", {}, {"qk_l2norm": True, "scale": 0.5}),
}


@pytest.mark.parametrize("label", OPTIONS)
def test_options(label: str) -> None:
    name, mode, changes, options = OPTIONS[label]
    setup = pinned_setup(BLOCKS, "cpu", FP32, FP32, "lossless")
    inputs = inputs_of(setup, bushy(rows_of(name)), name, mode=mode)
    if "unnormalised" in label:
        inputs.k.mul_(0.3)
    gates = {n: t for n, t in {**inputs.gates, **changes}.items() if t is not None}
    inputs = inputs.replace(gates=gates, options={**inputs.options, **options})
    check_verify(setup, inputs)


@pytest.mark.parametrize(("name", "nodes"), [("kda", 64), ("kda", 32), ("rwkv7", 32), ("comba", 16), ("gdn2", 64)])
def test_refusals(name: str, nodes: int) -> None:
    problem = Problem("verify", name, 64, 32, 1, "fp16", "fp32", "ready", "fast", nodes, 16, 0, 1)
    variant, limits = get_variant("verify", "three_stage_blocks"), gpus.get("h200").limits()
    rows = f"{nodes} rows are no more than a tile of other variants"
    assert variant.applies(problem) == (None if nodes == 64 and name == "gdn2" else rows)
    larger = problem.replace(nodes=512, pending=64)
    config = default_config(larger, limits)
    assert config.variant == "three_stage_blocks"
    assert variant.reason(larger, config, limits) is None
    assert "has one decay a head" in str(variant.applies(larger.replace(family="gdn")))
    odd = variant.config({**config.as_dict(), "slice": 64, "prepare_warps": 1})
    assert "fit the registers of the second kernel" in str(variant.reason(larger, odd, limits))
