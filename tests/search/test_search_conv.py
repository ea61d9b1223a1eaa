"""Searches of convolutions: the check sees every way to be wrong, inputs at full size, buckets, the model's bytes.

The torch backend plays the kernel, corrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from search_sim import Simulation

from bole_codegen.search import conv_case, conv_inputs, conv_operands, roofline
from bole_codegen.search.conv_case import BOUND, ConvCase
from bole_codegen.search.conv_inputs import conv_layer_count, open_conv
from bole_codegen.search.conv_roofline import commit_bytes, conv_traffic
from bole_codegen.search.conv_targets import ConvGeometry, make_conv_targets
from bole_codegen.search.kinds import kind_of
from bole_codegen.search.results import CandidateError
from bole_codegen.search.simulate import Surface
from bole_codegen.search.targets import Target, class_of, classes
from bole_runtime import gpus
from bole_runtime.kernels.conv_problem import ConvProblem
from bole_runtime.kernels.variants import all_variants, get_variant

CONV = ConvProblem("tree_conv", 64, 4, 3, "bf16", "bf16", False, True, False, 16, 0, 1)
COMMIT = CONV.replace(op="conv_commit", silu=False)
QWEN = ConvGeometry(8192, 4, 3)


def targets(geometry: ConvGeometry = QWEN, **changes: Any) -> tuple[Target, ...]:
    options: dict[str, Any] = {
        "ops": ["tree_conv"],
        "in_dtypes": ["bf16"],
        "state_dtypes": ["bf16"],
        "nodes": [16],
        "batches": [8],
        "pendings": [0],
    }
    return make_conv_targets([geometry], **{**options, **changes})


@pytest.mark.parametrize("pending", [0, 16])
@pytest.mark.parametrize("state_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "problem",
    [CONV, CONV.replace(bias=True, silu=False), CONV.replace(dynamic=True, width=3, length=4), COMMIT],
)
def test_a_right_kernel_passes(problem: ConvProblem, state_dtype: str, pending: int) -> None:
    check = ConvCase(problem.replace(state_dtype=state_dtype, pending=pending), "cpu", 3)
    assert check.run(None) <= (BOUND if problem.op == "tree_conv" else 0.0)
    assert check.gate(None) < 2**-8


def _scale(options: Any, run: int) -> None:
    options["out"][..., -1] *= 1.1


def _unwritten(options: Any, run: int) -> None:
    options["out"][2, 3, -1] = math.nan


def _beyond(options: Any, run: int) -> None:
    out = options["out"]
    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel() + 5).fill_(1.0)


def _state(options: Any, run: int) -> None:
    options["state"][6, 0, 0] = 1.0


def _race(options: Any, run: int) -> None:
    if run % 2:
        options["out"][0, 0, 0] += 0.5


def _copy(options: Any, run: int) -> None:
    if options["factors"] is not None:
        options["factors"].x[0, 0, 0] += 1.0


@pytest.mark.parametrize(
    ("corrupt", "kind"),
    [
        (_scale, "wrong"),
        (_unwritten, "nan"),
        (_beyond, "bounds"),
        (_state, "bounds"),
        (_race, "races"),
        (_copy, "wrong"),
    ],
)
@pytest.mark.parametrize("look", ["run", "gate"])
def test_a_wrong_convolution_is_named(
    corrupt: Callable[[Any, int], None], kind: str, look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = ConvCase(CONV, "cpu", 0)
    real, count = conv_operands.tree_conv, iter(range(100))

    def wrong(*args: Any, **options: Any) -> Any:
        result = real(*args, **options)
        corrupt(options, next(count))
        return result

    monkeypatch.setattr(conv_operands, "tree_conv", wrong)
    with pytest.raises(CandidateError) as caught:
        getattr(check, look)(None)
    assert caught.value.kind == kind


def _other_slot(pools: Any) -> None:
    pools[-1][-1] = 0.0


def _wrong_input(pools: Any) -> None:
    pools[0][3, 1] = pools[0][3, 0]


def _second_layer(pools: Any) -> None:
    if len(pools) == 2:
        pools[1][3] *= 1.01


@pytest.mark.parametrize(
    ("corrupt", "kind"), [(_other_slot, "bounds"), (_wrong_input, "wrong"), (_second_layer, "wrong")]
)
def test_a_wrong_commit_is_named(corrupt: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check = ConvCase(COMMIT, "cpu", 0)
    real = conv_case.conv_commit

    def wrong(pool: Any, *args: Any, **options: Any) -> None:
        real(pool, *args, **options)
        corrupt(list(pool) if isinstance(pool, list) else [pool])

    monkeypatch.setattr(conv_case, "conv_commit", wrong)
    with pytest.raises(CandidateError) as caught:
        check.run(None)
    assert caught.value.kind == kind


@pytest.mark.parametrize("pending", [0, 16])
@pytest.mark.parametrize("op", ["tree_conv", "conv_commit"])
def test_a_bucket_at_full_size_is_checked_and_left_as_it_was(
    op: str, pending: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (target,) = targets(ConvGeometry(48, 4, 3, bias=True), ops=[op], batches=[5], pendings=[pending])
    layers = conv_layer_count(target, 1 << 16, 1 << 30)
    assert layers % (24 if op == "conv_commit" else 1) == 0
    opened = open_conv(target, layers, 0, "cpu")
    used = opened.layers[0].slots.long()[[0, 2, 4]]
    before = opened.layers[0].state[used].clone()
    assert opened.spot_check(None) <= 2**-8  # type: ignore[arg-type]
    assert torch.equal(opened.layers[0].state[used], before)
    make, nodes, each = opened.launches(None)  # type: ignore[arg-type]
    assert nodes * each == layers
    make(nodes - 1)()
    assert opened.floor_bytes() > 0

    def wrong(*args: Any, **options: Any) -> Any:
        result = real(*args, **options)
        target = options["out"] if op == "tree_conv" else args[0]
        if target is not None:  # Else it plays the reference.
            target[..., -1] += 1.0
        return result

    place = conv_operands if op == "tree_conv" else conv_inputs
    name = "tree_conv" if op == "tree_conv" else "conv_commit"
    real = getattr(place, name)
    monkeypatch.setattr(place, name, wrong)
    with pytest.raises(CandidateError, match="at full size"):
        opened.spot_check(None)  # type: ignore[arg-type]


def test_layers_are_cold_whatever_their_number_of_requests() -> None:
    l2 = gpus.get("h200").l2_bytes
    for op in ("tree_conv", "conv_commit"):
        for target in targets(ops=[op], batches=[1, 64]):
            layers = conv_layer_count(target, l2, 100 << 30)
            assert layers * conv_traffic(target).total > 3 * l2
    with pytest.raises(CandidateError, match=r"needs \d+ MiB, 1 are free"):
        conv_layer_count(targets()[0], l2, 1 << 20)


def test_bytes_are_those_of_the_documentation() -> None:
    (conv,) = targets(batches=[64])
    b, n, c = 64, 16, 8192
    traffic = conv_traffic(conv)
    assert traffic.total - traffic.factors == b * (2 * n * c + 3 * c) * 2 + 4 * c * 2
    assert traffic.factors == b * n * c * 2
    (commit,) = targets(ops=["conv_commit"], batches=[64])
    assert conv_traffic(commit).total == b * 2 * 3 * c * 2
    # One accepted token: two inputs of the state stay.
    assert commit_bytes(commit, [1]) == (2 * c * 2, 3 * c * 2, c * 2)


def test_buckets_of_a_convolution() -> None:
    found = targets(ConvGeometry(6144, 4, 3), ops=["tree_conv", "conv_commit"], batches=[1, 3, 4], pendings=[0, 5])
    assert len(found) == 2 * 2 * 2
    assert {(t.problem.channels, t.hv) for t in found} == {(8192, 6144)}  # type: ignore[attr-defined]
    assert {t.batch for t in found if t.problem.work == 4} == {4}
    commit = next(t.problem for t in found if t.problem.op == "conv_commit")
    assert commit == class_of(commit).replace(work=commit.work)
    assert commit.silu is False  # type: ignore[attr-defined]
    assert {len(members) for members in classes(found).values()} == {2}
    (widest,) = make_conv_targets(
        [ConvGeometry(6144, 4, 3), QWEN], ops=["tree_conv"], in_dtypes=["bf16"], state_dtypes=["bf16"],
        nodes=[16], batches=[8], pendings=[0],
    )  # fmt: skip
    assert widest.hv == 8192


def test_the_model_ranks_by_bytes_and_programs() -> None:
    (target,) = targets(batches=[64])
    record, variant = gpus.get("h200"), get_variant("tree_conv", "gather")
    limits = record.limits()
    default = variant.default(target.problem, limits)
    tiny = variant.config({"bc": 32, "nb": 1, "warps": 1})
    floor = roofline.floor_us(target, record)
    us = roofline.predict_us(target, default, variant, record)
    assert floor < us < 10 * floor
    assert roofline.predict_us(target, tiny, variant, record) > us


def test_a_simulated_search_finds_what_is_near_the_best(tmp_path: Path) -> None:
    chosen = targets(ops=["tree_conv", "conv_commit"], batches=[1, 8, 64], pendings=[0])
    surface = Surface(seed=3, faulty={"wrong": 0.05, "late wrong": 0.05, "hang": 0.02})
    simulation = Simulation(tmp_path / "journal", surface, trials=60, anchors=3)
    result = simulation.run(chosen)
    assert len(result.entries) == 6
    for target in chosen:
        problem = target.problem
        every = (c for v in all_variants(problem.op) for c in v.enumerate(problem, simulation.env.limits))
        good = [c for c in every if surface.fault(class_of(problem), c) is None]
        best = min(simulation.evaluator.true_us(target, c) for c in good)
        assert simulation.true(target) < 1.06 * best
        variant, params = simulation.table()[problem.key()]
        held = get_variant(problem.op, variant).config(dict(params))
        assert held in good or held in simulation._defaults


@pytest.mark.parametrize(
    ("nb", "nodes", "blocks", "wide"), [(16, 16, 1, 1), (1, 16, 16, 2), (4, 16, 2, 2), (2, 32, 16, 2), (32, 64, 2, 2)]
)
def test_compiled_ahead_is_what_launches_ask_for(nb: int, nodes: int, blocks: int, wide: int) -> None:
    problem = CONV.replace(nodes=nodes)
    config = get_variant("tree_conv", "gather").config({"bc": 64, "nb": nb, "warps": 1})
    kind = kind_of(problem)
    assert kind.scalars(problem, config, False) == {"node_blocks": blocks}
    assert kind.scalars(problem, config, True) == {"node_blocks": wide}
