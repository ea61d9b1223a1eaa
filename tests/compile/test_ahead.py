"""What is compiled ahead is what launches ask Triton for, under the key that they look for in its cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
from bole_testing.cases.base import dense_tree, make_inputs, packed_tree
from bole_testing.pins import Pin, pinned_setup
from bole_testing.recording import recording
from triton import knobs
from triton.runtime import driver

from bole_codegen.compile import Resources, offline
from bole_codegen.render import render
from bole_codegen.search import compile_bench
from bole_codegen.search.conv_targets import ConvGeometry, make_conv_targets
from bole_codegen.search.kinds import kind_of
from bole_codegen.search.targets import Geometry, Target, make_targets
from bole_runtime import Factors, gpus, verify
from bole_runtime.kernels.space import Config
from bole_runtime.kernels.variants import get_variant

GPU = "h200"
LIMITS = gpus.get(GPU).limits()


def target(op: str, **changes: Any) -> Target:
    options: dict[str, Any] = {
        "families": ["gdn"],
        "in_dtypes": ["bf16"],
        "state_dtypes": ["fp32"],
        "gate_modes": ["raw"],
        "precisions": ["lossless"],
        "nodes": [16],
        "batches": [4],
        "pendings": [0],
    }
    (made,) = make_targets([Geometry(2, 4, 32, 48)], ops=[op], **{**options, **changes})
    return made


def convolution(op: str, **changes: Any) -> Target:
    options = {"nodes": [16], "pendings": [0], "state_dtypes": ["bf16"]}
    geometry = ConvGeometry(128, 4, 3, bias=changes.pop("bias", False), dynamic=changes.pop("dynamic", False))
    (made,) = make_conv_targets([geometry], ops=[op], in_dtypes=["bf16"], batches=[4], **{**options, **changes})
    return made


def launched(body: Callable[[], object]) -> set[str]:
    """Return what the launches of a call ask Triton for."""
    with recording(GPU) as made:
        body()
    return {job.specialisation for job in made.jobs.values()}


def ahead(body: Callable[[], object]) -> set[str]:
    """Return what compiling ahead asks Triton for."""
    found = set()

    def hook(*, compile: dict[str, Any], **_: Any) -> bool:
        found.add(compile["specialization_data"])
        return True

    with mock.patch.object(knobs.runtime, "jit_cache_hook", hook):
        body()
    return found


CASES = [
    ("fused", target("verify")),
    ("fused", target("verify", gate_modes=["ready"], in_dtypes=["fp16"], state_dtypes=["fp16"])),
    ("two_stage", target("verify", precisions=["fast"])),
    ("two_stage", target("verify", pendings=[16], state_dtypes=["bf16"])),
    ("chunked", target("verify", gate_modes=["ready"], nodes=[32])),
    ("path", target("commit")),
    ("steps", target("commit", gate_modes=["ready"], state_dtypes=["bf16"])),
    ("steps", target("commit", pendings=[16])),
]


@pytest.mark.parametrize(("variant", "case"), CASES, ids=lambda c: c if isinstance(c, str) else c.problem.key())
def test_a_search_compiles_what_its_launches_ask_for(variant: str, case: Target) -> None:
    compiles_what_launches_ask_for(case, get_variant(case.problem.op, variant).default(case.kernels, LIMITS))


@pytest.mark.parametrize(
    ("case", "tiles"),
    [
        (convolution("tree_conv"), {"nb": 16}),
        # Blocks of nodes: 16 in the launch that is timed and 13 in the other, 4, 32 and 29.
        (convolution("tree_conv", bias=True, pendings=[16]), {"nb": 1}),
        (convolution("tree_conv", state_dtypes=["fp32"]), {"nb": 4}),
        (convolution("tree_conv", nodes=[32], dynamic=True), {"nb": 1}),
        (convolution("conv_commit"), {}),
        (convolution("conv_commit", pendings=[16]), {}),
    ],
    ids=lambda c: c.problem.key() if isinstance(c, Target) else str(c),
)
def test_a_search_of_a_convolution_does_too(case: Target, tiles: dict[str, int]) -> None:
    variant = get_variant(case.problem.op, "gather" if tiles else "shift")
    values = variant.default(case.kernels, LIMITS).as_dict()
    compiles_what_launches_ask_for(
        case, variant.config({**values, **({"bc": 64, "warps": 2} if tiles else {}), **tiles})
    )


def compiles_what_launches_ask_for(case: Target, config: Config) -> None:
    problem = case.kernels
    check, bucket = kind_of(problem).check(problem, "cpu", 0), kind_of(problem).open(case, 2, 0, "cpu")
    if problem.op == "verify":
        bucket.spot_check(None)  # type: ignore[arg-type]  # keeps the fp64 reference, which no kernel serves

    def launches() -> None:
        check.gate(config)
        check.run(config)
        bucket.launches(config)[0](0)()
        if problem.op in ("verify", "tree_conv"):
            bucket.spot_check(config)

    def compile_only(
        kernel: Any, problem: Any, limits: Any, present: Any = frozenset(), scalars: Any = offline.NONE
    ) -> Resources:
        assert offline.request(kernel, problem, limits, present, scalars) is None
        return Resources(0, 0, 0, 0, 0.0, b"")

    def compilations() -> None:
        bench = compile_bench.CompileBench(GPU)
        for index in range(len(render(problem, config))):
            for wide in (False, True):
                bench.compile(problem, config, index, wide)

    with mock.patch.object(compile_bench, "compile_offline", compile_only):
        made = ahead(compilations)
    asked = launched(launches)
    assert asked
    assert asked <= made


@pytest.mark.parametrize("packed", [False, True])
def test_optional_tensors_can_be_named(packed: bool) -> None:
    """A server captures factors and may pack its trees, which asks for kernels of its own."""
    problem = target("verify").kernels
    config = get_variant("verify", "fused").default(problem, LIMITS)
    setup = pinned_setup(Pin(), "cpu", torch.bfloat16, torch.float32, "lossless", LIMITS)
    rows = [list(range(-1, 9)), list(range(-1, 14))]
    tree = packed_tree(setup, rows) if packed else dense_tree(setup, [rows[0] + [-2] * 5, rows[1]])
    given = make_inputs(setup, tree, heads=(2, 4), dims=(32, 48), mode="raw")
    gates = {n: t.bfloat16() if t.dim() > 1 else t for n, t in given.gates.items()}
    factors = Factors.allocate(tree, key_heads=2, value_heads=4, dk=32, dv=48)
    arguments = {**given.arguments, "gates": gates}
    asked = launched(lambda: verify(given.q, given.k, given.v, factors=factors, variant=config, **arguments))
    present = {"ck_ptr", "cv_ptr", "cg_ptr", "cbeta_ptr", *(["offsets_ptr"] if packed else [])}
    (kernel,) = render(problem, config)
    assert asked == ahead(lambda: offline.request(kernel, problem, LIMITS, frozenset(present)))


def test_compiling_for_a_gpu_leaves_no_trace() -> None:
    before = dict(vars(driver))
    problem = target("verify").kernels
    (kernel,) = render(problem, get_variant("verify", "fused").default(problem, LIMITS))
    ahead(lambda: offline.request(kernel, problem, LIMITS))
    assert vars(driver) == before
