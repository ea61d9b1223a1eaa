"""Rendering: deterministic, strict about undefined names, named after its text; every valid configuration parses."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import os
import re
import subprocess
import sys

import jinja2
import pytest
from bole_testing.goldens import GOLDENS, golden_kernel

from bole_codegen import render as module
from bole_codegen.render import render
from bole_runtime import gpus
from bole_runtime.kernels import Config, Problem, default_config
from bole_runtime.kernels.text import text_hash
from bole_runtime.kernels.variants import all_variants

LIMITS = gpus.get("h200").limits()
SMALL = (
    Problem("verify", "gdn", 16, 16, 2, "fp16", "fp32", "ready", "lossless", 16, 16, 0, 64),
    Problem("verify", "gdn", 20, 16, 2, "bf16", "fp32", "raw", "fast", 16, 16, 0, 64),
    Problem("verify", "gdn", 64, 24, 2, "bf16", "fp32", "raw", "fast", 16, 16, 16, 64),
    Problem("commit", "gdn", 48, 40, 3, "bf16", "bf16", "raw", "fast", 16, 16, 16, 64),
    Problem("commit", "gdn", 16, 16, 1, "fp32", "fp32", "ready", "lossless", 64, 64, 0, 64),
)

DIGEST = """
import hashlib
from bole_testing.goldens import GOLDENS, golden_kernel
print(hashlib.sha256("".join(golden_kernel(label).source for label in GOLDENS).encode()).hexdigest())
"""


def test_the_same_bytes_again_and_in_another_process() -> None:
    first = [golden_kernel(label) for label in GOLDENS]
    render.cache_clear()
    module._environment.cache_clear()
    assert [golden_kernel(label) for label in GOLDENS] == first
    env = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", DIGEST], env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == hashlib.sha256("".join(k.source for k in first).encode()).hexdigest()


@pytest.mark.parametrize("label", GOLDENS)
def test_an_undefined_name_is_an_error(label: str) -> None:
    made = golden_kernel(label)
    problem = SMALL[0].replace(precision="fast" if "fast" in label else "lossless")
    plan = made.plan
    whole = module._render_plan(problem, plan).source
    refused = set()
    for key in plan.context:
        less = dataclasses.replace(plan, context={k: v for k, v in plan.context.items() if k != key})
        try:
            # A name that the template never reads may go.
            assert module._render_plan(problem, less).source == whole, key
        except (jinja2.UndefinedError, KeyError, TypeError):  # range() of an undefined name is a TypeError
            refused.add(key)
    assert {"constants", "config_line", "spec_line"} <= refused


def _valid(problem: Problem) -> list[Config]:
    """Every valid configuration, or some hundred of each variant; its first ones where a search leaves it out."""
    found = []
    for variant in (v for v in all_variants(problem.op) if v.applies(problem) is None):
        configs = list(variant.enumerate(problem, LIMITS)) or variant.first(problem, LIMITS)
        found += configs[:: max(1, len(configs) // 200)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("problem", SMALL, ids=lambda p: f"{p.op}-{p.precision}-dk{p.dk}")
def test_every_valid_configuration(problem: Problem) -> None:
    configs = _valid(problem)
    assert {c.variant for c in configs} == {v.name for v in all_variants(problem.op) if v.applies(problem) is None}
    code: dict[str, tuple[str, str]] = {}
    for config in configs:
        for made in render(problem, config):
            comparable = re.sub(r"^#.*\n", "", made.source.replace(made.name, "KERNEL"), flags=re.MULTILINE)
            seen = code.setdefault(made.name, (comparable, str(made.plan.options)))
            # One name, one text and one way to launch it.
            assert seen == (comparable, str(made.plan.options)), f"{made.name} has two meanings"
    assert len(set(code.values())) == len(code), "two names for one kernel"
    for name, (text, _) in code.items():
        tree = ast.parse(text)
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert functions[-1] == "KERNEL", name
        assert not re.search(r"[ \t]$|\{\{|\{%|Undefined", text, flags=re.MULTILINE), name


def test_sizes_that_only_choose_do_not_shape_the_text() -> None:
    problem = SMALL[0]
    config = default_config(problem, LIMITS)
    other = problem.replace(work=1 << 14, depth=8)
    assert render(problem, config) == render(other, config)


@pytest.mark.parametrize("label", GOLDENS)
def test_the_hash_is_of_the_code(label: str) -> None:
    source = golden_kernel(label).source
    commented = "# one more comment\n\n" + re.sub(r"\n( +)pid", r"\n\n\1# and one here\n\1pid", source, count=1)
    commented = re.sub(r"^( +pid = .*)$", r"\1  # and here", commented, count=1, flags=re.MULTILINE)
    assert commented.count("# and here") == 1
    assert text_hash(commented) == text_hash(source)
    assert text_hash(source.replace("tl.program_id(0)", "tl.program_id(1)", 1)) != text_hash(source)


def test_launch_options_are_part_of_the_name() -> None:
    made = golden_kernel("verify_fused_ready_lossless")
    more = dataclasses.replace(made.plan, num_warps=2 * made.plan.num_warps)
    other = module._render_plan(SMALL[0], more)
    assert other.name != made.name


def test_the_second_kernel_of_a_chain_may_not_start_before_the_inputs_of_the_first_are_there() -> None:
    # It reads them too, and waits for the first kernel only afterwards.
    problem = SMALL[0].replace(work=4096)
    prepare, readout = render(problem, default_config(problem, LIMITS))
    assert prepare.source.index("gdc_wait()") < prepare.source.index("gdc_launch_dependents()")
    assert "gdc_launch_dependents()" in readout.source
