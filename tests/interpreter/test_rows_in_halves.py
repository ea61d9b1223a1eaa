"""A decay a key channel over up to 64 rows, whose first kernel works on halves of them, interpreted, against the
float64 recurrence: what is out of range of its exponentials, and values of the solve out of range of fp16."""

from __future__ import annotations

import pytest
import torch
from bole_testing.cases.base import Inputs, Setup, dense_tree
from bole_testing.cases.checks import check_commit, check_verify
from bole_testing.cases.draws import Draw
from bole_testing.families import family_inputs, run_family_draw
from bole_testing.pins import pin, pinned_setup

from bole_runtime.families import FAMILIES

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("triton_on_cpu")]

FP32, FP16 = torch.float32, torch.float16
HALVES = pin("two_stage_slices", bv=16, commit={"variant": "steps"})
FEW = pin(
    "two_stage_slices",
    bv=16,
    halves=True,
    slice=16,
    prepare_warps=1,
    prepare_registers=168,
    commit={"variant": "steps"},
)
CHAIN = list(range(-1, 63))
#: Nodes of the second half whose ancestors are in the first, in both, and in neither.
BUSHY = [-1, *[i // 3 for i in range(37)], *range(37, 43), -1, 44, 45, 7, 47, -2, 48, 46]
GATES: dict[str, list[float]] = {
    "side by side": [0.0, -50.0],
    "mixed": [0.0, -3.0, -6.0, -20.0, -50.0, -1000.0],
    "one closed": [-0.01] * 60 + [-torch.inf],
    "near the limit": [-3.7, -4.1, -3.5, 0.0],
}


def setup_of(precision: str, in_dtype: torch.dtype = FP32) -> Setup:
    return pinned_setup(HALVES, "cpu", in_dtype, FP32, precision)


def inputs_of(setup: Setup, parents: list[int], family: str = "kda", **more: object) -> Inputs:
    tree = dense_tree(setup, [parents])
    return family_inputs(setup, FAMILIES[family], tree, heads=(1, 1), dims=(40, 16), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["ready", "raw"])
@pytest.mark.parametrize("pending", [0, 30])
@pytest.mark.parametrize("name", ["kda", "gla"])
def test_random_trees(name: str, pending: int, mode: str) -> None:
    precision = ("lossless", "fast")[(pending > 0) ^ (mode == "raw")]
    sizes = (30, 9) if pending else (64, 41)
    problem = Draw(sum(sizes), sizes, pending > 0, (1, 2), (72, 24), mode, 0.2, pending, True, True)
    run_family_draw(setup_of(precision, (FP32, FP16)[name == "kda"]), name, problem)


@pytest.mark.parametrize("mode", ["ready", "raw"])
@pytest.mark.parametrize("pending", [0, 11])
@pytest.mark.parametrize("name", ["kda", "gla"])
def test_halves_of_32_rows(name: str, pending: int, mode: str) -> None:
    precision = ("lossless", "fast")[(pending > 0) ^ (mode == "ready")]
    sizes = (16, 9) if pending else (32, 21)
    problem = Draw(sum(sizes), sizes, pending == 0, (2, 2), (40, 24), mode, 0.2, pending, True, True)
    run_family_draw(pinned_setup(FEW, "cpu", (FP32, FP16)[name == "gla"], FP32, precision), name, problem)


@pytest.mark.parametrize("precision", ["lossless", "fast"])
@pytest.mark.parametrize("label", GATES)
@pytest.mark.parametrize("parents", [CHAIN, BUSHY], ids=["chain", "bushy"])
def test_strong_gates(parents: list[int], label: str, precision: str) -> None:
    setup = setup_of(precision, (FP32, FP16)[precision == "fast"])
    check_strong_gates(setup, parents, label)


@pytest.mark.parametrize("precision", ["lossless", "fast"])
def test_strong_gates_of_32_rows(precision: str) -> None:
    setup = pinned_setup(FEW, "cpu", FP32, FP32, precision)
    check_strong_gates(setup, [-1, *[i // 2 for i in range(20)], *range(20, 31)], "mixed")


def check_strong_gates(setup: Setup, parents: list[int], label: str) -> None:
    inputs = inputs_of(setup, parents)
    values, g = torch.tensor(GATES[label]), inputs.gates["g"]
    g.copy_(values[torch.randint(0, len(values), g.shape, generator=torch.Generator().manual_seed(len(label)))])
    if label == "side by side":
        g.zero_()
        g[..., ::2] = -50.0
        g[:, 40, :, 5] = -1000.0
    check_commit(setup, inputs, check_verify(setup, inputs), [min(43, len(parents) - 1)])


@pytest.mark.parametrize("gate", [-0.93, -0.95])
def test_gates_that_add_up_to_the_widest_range(gate: float) -> None:
    setup = setup_of("lossless")
    check_verify(setup, inputs_of(setup, CHAIN, gates={"g": torch.full((1, 64, 1, 40), gate)}))


def test_one_huge_gate_costs_nothing_below_it() -> None:
    setup = setup_of("lossless")
    inputs = inputs_of(setup, CHAIN)
    inputs.gates["g"].fill_(-0.0123)
    inputs.gates["g"][:, 1] = -1000.0
    check_verify(setup, inputs)


@pytest.mark.parametrize("precision", ["lossless", "fast"])
def test_rows_too_large_to_square(precision: str) -> None:
    setup = setup_of(precision)
    inputs = inputs_of(setup, BUSHY)
    inputs.k[:, 3].mul_(1e30)
    inputs.k[:, 35].mul_(1e15)
    inputs.q[:, 4].mul_(1e30)
    inputs.q[:, 50].mul_(1e36)
    inputs.gates["g"][..., 3] = -40.0
    check_commit(setup, inputs, check_verify(setup, inputs), [43])


def test_channels_too_large_for_their_decay() -> None:
    setup = setup_of("lossless")
    inputs = inputs_of(setup, BUSHY, "gla")
    inputs.gates["g"].fill_(-2.0)
    inputs.k[..., 3].mul_(1e28)
    inputs.q[..., 3].mul_(1e-28)
    inputs.state[..., 3].zero_()
    check_verify(setup, inputs)


@pytest.mark.parametrize("precision", ["lossless", "fast"])
@pytest.mark.parametrize("beta", [1.0, 2.0, -0.2])
def test_repeated_keys(beta: float, precision: str) -> None:
    setup = setup_of(precision, FP16)
    gates = {"beta": torch.full((1, 64, 1), beta), "g": torch.zeros(1, 64, 1, 40)}
    inputs = inputs_of(setup, CHAIN, gates=gates)
    inputs.k.copy_(inputs.k[:, :1].clone().expand_as(inputs.k))
    check_verify(setup, inputs, sequential=beta < 0)
