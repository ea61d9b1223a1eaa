"""The check must see every way in which a kernel can be wrong. The torch backend plays the kernel, corrupted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bole_codegen.search import case as case_module
from bole_codegen.search import operands as operands_module
from bole_codegen.search.bucket_inputs import layer_count, open_bucket
from bole_codegen.search.case import GUARD, CheckCase, Guarded, bound
from bole_codegen.search.results import CandidateError
from bole_codegen.search.targets import Geometry, make_targets
from bole_runtime.families import KERNEL_FAMILIES, get_family
from bole_runtime.kernels.problem import Problem

VERIFY = Problem("verify", "gdn", 32, 48, 2, "bf16", "fp32", "raw", "fast", 16, 16, 0, 1)
COMMIT = VERIFY.replace(op="commit", precision="lossless")


@pytest.mark.parametrize("pending", [0, 16])
@pytest.mark.parametrize("gate_mode", ["raw", "ready"])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("op", ["verify", "commit"])
def test_a_right_kernel_passes(op: str, state_dtype: str, gate_mode: str, pending: int) -> None:
    problem = VERIFY.replace(op=op, state_dtype=state_dtype, gate_mode=gate_mode, pending=pending, precision="lossless")
    assert CheckCase(problem, "cpu", 3).run(None) <= bound(problem)


@pytest.mark.parametrize("op", ["verify", "commit"])
@pytest.mark.parametrize("family", [name for name in KERNEL_FAMILIES if name != "gdn"])
def test_a_right_kernel_of_another_family_passes(family: str, op: str) -> None:
    mode = get_family(family).modes[-1]
    problem = VERIFY.replace(op=op, family=family, gate_mode=mode, pending=16, precision="lossless", qk_l2norm=False)
    assert CheckCase(problem, "cpu", 3).run(None) <= bound(problem)
    (target,) = make_targets(
        [Geometry(2, 4, 16, 16)], ops=[op], families=[family], in_dtypes=["bf16"], state_dtypes=["fp32"],
        gate_modes=[mode], precisions=["lossless"], nodes=[16], batches=[2], pendings=[0],
    )  # fmt: skip
    inputs = open_bucket(target, 1, 0, "cpu")
    assert inputs.spot_check(None) <= bound(target.problem)


def _verify_that(corrupt: Callable[[Any, int], None], monkeypatch: pytest.MonkeyPatch) -> CheckCase:
    """Return a check whose kernel is right and then corrupts its call."""
    check = CheckCase(VERIFY, "cpu", 0)
    real, count = operands_module.verify, iter(range(100))

    def wrong(*args: Any, **options: Any) -> Any:
        result = real(*args, **options)
        corrupt(options, next(count))
        return result

    monkeypatch.setattr(operands_module, "verify", wrong)
    return check


def _scale(options: Any, run: int) -> None:
    options["out"][..., -1] *= 1.1


def _unwritten(options: Any, run: int) -> None:
    options["out"][2, 3, 1, -1] = math.nan


def _zero(options: Any, run: int) -> None:
    options["out"].zero_()


def _beyond(options: Any, run: int) -> None:
    out = options["out"]
    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel() + 5).fill_(1.0)


def _before(options: Any, run: int) -> None:
    out = options["out"]
    torch.as_strided(out, (1,), (1,), out.storage_offset() - GUARD).fill_(math.nan)


def _state(options: Any, run: int) -> None:
    options["state"][6, 0, 0, 0] = 1.0


def _race(options: Any, run: int) -> None:
    if run:
        options["out"][0, 0, 0, 0] += 1e-4


@pytest.mark.parametrize(
    ("corrupt", "kind"),
    [
        (_scale, "wrong"),
        (_zero, "wrong"),
        (_unwritten, "nan"),
        (_beyond, "bounds"),
        (_before, "bounds"),
        (_state, "bounds"),
        (_race, "races"),
    ],
)
def test_a_wrong_verify_is_named(corrupt: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CandidateError) as caught:
        _verify_that(corrupt, monkeypatch).run(None)
    assert caught.value.kind == kind


def _commit_all(pools: Any, run: int) -> None:
    pools[-1][-1] = 0.0


def _commit_wrong(pools: Any, run: int) -> None:
    pools[-1][3] *= 1.001


def _commit_second_layer(pools: Any, run: int) -> None:
    if len(pools) == 2:
        pools[1][3] *= 1.001


def _commit_race(pools: Any, run: int) -> None:
    if run == 2:
        pools[0][3] *= 1.0000002


@pytest.mark.parametrize(
    ("corrupt", "kind"),
    [(_commit_all, "bounds"), (_commit_wrong, "wrong"), (_commit_second_layer, "wrong"), (_commit_race, "races")],
)
def test_a_wrong_commit_is_named(corrupt: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check = CheckCase(COMMIT, "cpu", 0)
    real, count = case_module.commit, iter(range(100))

    def wrong(pool: Any, *args: Any, **options: Any) -> None:
        real(pool, *args, **options)
        corrupt(list(pool) if isinstance(pool, list) else [pool], next(count))

    monkeypatch.setattr(case_module, "commit", wrong)
    with pytest.raises(CandidateError) as caught:
        check.run(None)
    assert caught.value.kind == kind


def test_a_guarded_copy_sees_any_bit_of_its_borders() -> None:
    for place in (0, GUARD - 1, GUARD + 6, -1):
        guarded = Guarded.like(torch.ones(2, 3, dtype=torch.bfloat16))
        assert guarded.intact()
        guarded.whole[place] = math.nan
        assert not guarded.intact()
    guarded.inner.fill_(7.0)
    assert bool((guarded.inner == 7).all())


@pytest.mark.parametrize("pending", [0, 16])
@pytest.mark.parametrize("op", ["verify", "commit"])
def test_a_bucket_at_full_size_is_checked_and_left_as_it_was(op: str, pending: int) -> None:
    (target,) = make_targets(
        [Geometry(2, 4, 32, 16)],
        ops=[op],
        families=["gdn"],
        in_dtypes=["bf16"],
        state_dtypes=["fp32"],
        gate_modes=["raw"],
        precisions=["lossless"],
        nodes=[16],
        batches=[5],
        pendings=[pending],
    )
    layers = layer_count(target, 1 << 16, 1 << 30)
    assert (layers == 24) == (op == "commit")
    opened = open_bucket(target, layers, 0, "cpu")
    used = opened.inputs.slots.long()[[0, 2, 4]]
    before = opened.inputs.layers[0].state[used].clone()
    assert opened.spot_check(None) < 1e-5
    assert torch.equal(opened.inputs.layers[0].state[used], before)
    make, nodes, each = opened.launches(None)
    assert nodes * each == layers
    make(nodes - 1)()
    assert opened.floor_bytes() > opened.inputs.workload.state_bytes


def test_a_bucket_that_does_not_fit_says_so() -> None:
    (target,) = make_targets(
        [Geometry(16, 32, 128, 128)],
        ops=["verify"],
        families=["gdn"],
        in_dtypes=["bf16"],
        state_dtypes=["fp32"],
        gate_modes=["raw"],
        precisions=["fast"],
        nodes=[16],
        batches=[256],
        pendings=[0],
    )
    with pytest.raises(CandidateError, match=r"needs \d+ MiB, 64 are free"):
        layer_count(target, 1 << 20, 64 << 20)
