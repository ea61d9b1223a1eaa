"""Offline compilation for sm_90: defaults without spills, short reasons for what does not compile or does not fit."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import bole_tuned
from bole_codegen.render import RenderedKernel, render
from bole_runtime import gpus
from bole_runtime.kernels import Config, Problem
from bole_runtime.kernels.variants import all_variants, get_variant
from bole_runtime.tables.load import load_table

pytest.importorskip("triton")
from bole_codegen.compile import CompileError, compile_offline

H200 = gpus.get("h200").limits()
USUAL = Problem("verify", "gdn", 128, 128, 2, "bf16", "fp32", "raw", "fast", 16, 16, 0, 256)
#: Kernels of all tables that are compiled in every run; --exhaustive compiles all.
SAMPLE = 6
#: A chain and nodes in 16 rows.
EIGHT = USUAL.replace(nodes=8, depth=8, pending=8)


def kernels(name: str, problem: Problem) -> tuple[RenderedKernel, ...]:
    return render(problem, get_variant(problem.op, name).default(problem, H200))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("two_stage", USUAL),
        ("fused", USUAL.replace(precision="lossless", gate_mode="ready", work=32)),
        ("steps", USUAL.replace(op="commit", precision="lossless")),
        ("path", USUAL.replace(op="commit", precision="fast")),
        ("two_stage", EIGHT),
        ("two_stage", EIGHT.replace(state_dtype="bf16", precision="lossless", work=2048)),
        ("fused", EIGHT.replace(precision="lossless", work=32)),
        ("fused", EIGHT.replace(state_dtype="bf16", work=32)),
        ("four_stage", USUAL.replace(nodes=256, depth=256)),
        ("four_stage", USUAL.replace(nodes=256, depth=256, precision="lossless")),
    ],
    ids=[
        "two_stage",
        "fused",
        "commit",
        "commit by a solve",
        "8 two_stage",
        "8 lossless",
        "8 fused",
        "8 bf16",
        "many rows",
        "many, exact",
    ],
)
def test_defaults_do_not_spill(name: str, problem: Problem) -> None:
    for kernel in kernels(name, problem)[: 1 if problem.op == "commit" else None]:
        found = compile_offline(kernel, problem, H200)
        # Where registers are limited, for more programs at a time, a few values may go to memory. So do addresses of
        # tiles one after the other: the fastest commit on an H200 all the same. And two words of a
        # solve make room for a sixth program.
        assert found.spill_bytes <= {"steps": 16, "four_stage": 8}.get(name, 0) or kernel.plan.registers, kernel.name
        assert 0 < found.registers <= (kernel.plan.registers or 255)
        assert found.shared_bytes <= H200.smem_per_block
        assert found.threads == 32 * kernel.plan.num_warps
        assert found.programs_per_sm() >= 1
        assert found.cubin.startswith(b"\x7fELF")


SSD = USUAL.replace(family="mamba2", dv=64, group=16, qk_l2norm=False)
CHANNEL = USUAL.replace(family="kda", group=1)
DELTA = USUAL.replace(family="deltanet", group=1)
RWKV = USUAL.replace(family="rwkv7", dk=64, dv=64, group=1, qk_l2norm=False)
PLAIN = USUAL.replace(group=1, gate_mode="ready", qk_l2norm=False)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("fused", SSD),
        ("two_stage", SSD.replace(precision="lossless", pending=16)),
        ("fused", PLAIN.replace(family="lightning", pending=16)),
        ("two_stage", PLAIN.replace(family="retention", dv=256)),
        ("fused", PLAIN.replace(family="simple_gla", gate_mode="raw", work=32)),
        ("steps", PLAIN.replace(family="lightning", op="commit")),
        ("path", PLAIN.replace(family="linear_attention", op="commit")),
        ("fused", DELTA),
        ("two_stage", DELTA.replace(precision="lossless", pending=16)),
        ("steps", DELTA.replace(op="commit", precision="lossless")),
        ("path", DELTA.replace(op="commit")),
        ("slices", CHANNEL.replace(precision="lossless")),
        ("two_stage_slices", CHANNEL),
        ("two_stage_slices", CHANNEL.replace(precision="lossless", gate_mode="ready", nodes=32)),
        ("slices", CHANNEL.replace(precision="lossless", gate_mode="ready", work=32)),
        ("slices", CHANNEL.replace(family="gla", pending=16, qk_l2norm=False)),
        ("steps", CHANNEL.replace(op="commit", precision="lossless", pending=16)),
        ("slices", CHANNEL.replace(family="gdn2", precision="lossless")),
        ("slices", USUAL.replace(family="comba", precision="lossless", gate_mode="ready")),
        ("slices", RWKV.replace(precision="lossless")),
        ("three_stage_blocks", CHANNEL.replace(precision="lossless", nodes=128)),
        ("three_stage_blocks", CHANNEL.replace(family="gdn2", nodes=64)),
        ("three_stage_blocks", RWKV.replace(precision="lossless", nodes=64, pending=16)),
        ("steps", RWKV.replace(op="commit", pending=16)),
    ],
    ids=lambda x: x if isinstance(x, str) else x.family,
)
def test_other_families(name: str, problem: Problem) -> None:
    # A few bytes outside of loops are the price of one more program on a multiprocessor: the fastest on an H200.
    limit = 64 if name == "two_stage_slices" else 0
    for kernel in kernels(name, problem)[: 1 if problem.op == "commit" else None]:
        spilled = compile_offline(kernel, problem, H200).spill_bytes
        assert spilled <= limit or kernel.plan.registers, kernel.name


@pytest.mark.parametrize("problem", [CHANNEL.replace(nodes=128), RWKV.replace(nodes=64)], ids=lambda x: x.family)
def test_packed_trees_in_blocks(problem: Problem) -> None:
    # Names of what only packed trees read are taken in loops, too: the interpreter does not mind their types.
    lossless = problem.replace(precision="lossless")
    kernel = kernels("three_stage_blocks", lossless)[2]
    assert compile_offline(kernel, lossless, H200, frozenset({"offsets_ptr", "cv_ptr"})).spill_bytes <= 64


def test_too_much_shared_memory() -> None:
    kernel = kernels("two_stage", USUAL)[1]
    small = dataclasses.replace(H200, smem_per_block=1024)
    with pytest.raises(CompileError, match=r"^takes \d+ bytes of shared memory, a block has 1024$"):
        compile_offline(kernel, USUAL, small)


def test_what_does_not_compile_gives_one_short_reason() -> None:
    kernel = kernels("two_stage", USUAL)[1]
    name = f"{kernel.name}_broken"
    source = kernel.source.replace(kernel.name, name)
    source = re.sub(r"^    tile = .*$", "    tile = tl.no_such_function(1)", source, flags=re.MULTILINE)
    with pytest.raises(CompileError) as caught:
        compile_offline(dataclasses.replace(kernel, name=name, source=source), USUAL, H200)
    assert "no_such_function" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 400


def tuned() -> list[tuple[str, str, Problem, Config]]:
    """Every distinct kernel of the tables in the package: its GPU, its name, and what renders it."""
    found: dict[tuple[str, str], tuple[Problem, Config]] = {}
    for path in sorted(Path(next(iter(bole_tuned.__path__))).glob("*/*.json")):
        table = load_table(path, all_variants)
        for entry in table.entries:
            for kernel in entry.entry.kernels:
                found.setdefault((table.header.gpu.key, kernel.name), (entry.problem, entry.config))
    return [(*key, *found[key]) for key in sorted(found)]


def check_tuned(entries: list[tuple[str, str, Problem, Config]]) -> None:
    if not entries:
        pytest.skip("the package has no tables yet")
    for key, name, problem, config in entries:
        made = {kernel.name: kernel for kernel in render(problem, config)}
        # A table whose kernels have changed since is reported by the tests of the tables.
        kernel = made.get(name) or next(k for k in made.values() if name.startswith(k.plan.stem + "_"))
        # Winners were measured, so it does not matter what they spill.
        found = compile_offline(kernel, problem, gpus.get(key).limits())
        assert found.programs_per_sm() >= 1


@pytest.mark.slow
def test_a_sample_of_the_tuned_kernels() -> None:
    entries = tuned()
    check_tuned(entries[:: max(1, -(-len(entries) // SAMPLE))])


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_every_tuned_kernel() -> None:
    check_tuned(tuned())
