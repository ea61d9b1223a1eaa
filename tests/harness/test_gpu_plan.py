"""The plan of the GPU tests, and the compilation of their kernels where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_plan_covers_every_case_type_and_profile() -> None:
    pytest.importorskip("triton")
    from bole_testing.cases import ALL
    from bole_testing.gpu_plan import FAMILIES, SERVER, VARIANTS, cases

    from bole_runtime.kernels.variants import all_variants

    plan = cases()
    assert {case.name for case, _ in plan} == {case.name for case in ALL}
    assert {case.name for case, s in plan if s == SERVER} >= {c.name for c in ALL if c.applies(SERVER.in_dtype)}
    assert len({s.in_dtype for _, s in plan}) == len({s.state_dtype for _, s in plan}) == 3
    assert {s.precision for _, s in plan} == {"lossless", "fast"}
    pins = [e.setting.pin for e in (*VARIANTS, *(f.entry for f in FAMILIES))]
    assert {p.variant for p in pins} == {v.name for v in all_variants("verify")}
    commits = {dict(p.commit).get("variant", "path") for p in pins if p.commit}
    assert commits == {v.name for v in all_variants("commit")}


RECORD = """
import sys
import torch
from bole_testing.gpu_plan import SERVER
from bole_testing.cases import ALL
from bole_testing.recording import compile_job, recording
from bole_runtime import gpus

case = next(c for c in ALL if c.name == "path_skips_nodes")
with recording("h200") as made:
    case.body(SERVER.setup("cpu", gpus.get("h200").limits()))
assert made.calls == 4, made.calls
kinds = sorted(j.name.split("_k")[0].split("_")[1] for j in made.jobs.values())
assert kinds == ["commit", "verify"], made.jobs
compile_job(min(made.jobs.values(), key=lambda j: j.name), "h200")
print("compiled")
"""


def test_kernels_are_found_and_compiled_without_a_gpu(tmp_path: Path) -> None:
    # In a process of its own: Triton is told of a GPU that is not there.
    pytest.importorskip("triton")
    command = [sys.executable, "-W", "ignore", "-c", RECORD]
    env = {"PYTHONPATH": str(ROOT / "tests" / "helpers"), "TRITON_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert run.stdout.strip() == "compiled", run.stdout + run.stderr
    assert list(tmp_path.glob("*/*.cubin"))
