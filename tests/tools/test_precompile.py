"""What tools/precompile.py does with everything that the plan of the GPU tests asks for."""

from __future__ import annotations

import precompile
import pytest
from bole_testing.recording import Job

from bole_runtime import gpus
from bole_runtime.kernels import default_config
from bole_runtime.kernels.conv_problem import ConvProblem
from bole_runtime.kernels.problem import Problem

VERIFY = Problem("verify", "gdn", 128, 128, 2, "bf16", "fp32", "raw", "fast", 64, 16, 0, 64)
CONV = ConvProblem("tree_conv", 64, 4, 3, "bf16", "bf16", False, True, False, 16, 0, 8)


def test_every_kind_of_kernel_has_a_size() -> None:
    limits = gpus.get("h200").limits()
    problems = (CONV, VERIFY.replace(nodes=16), VERIFY, CONV.replace(op="conv_commit", silu=False))
    jobs = [Job(f"kernel{n}", p, default_config(p, limits), 0, "") for n, p in enumerate(problems)]
    assert [job.name for job in sorted(jobs, key=precompile.size, reverse=True)][:2] == ["kernel2", "kernel1"]


@pytest.mark.slow
def test_the_plan_is_recorded_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All but compiling, which stands for itself in the tests of compile/."""
    monkeypatch.setattr("sys.argv", ["precompile.py", "--tests", "--gpu", "h200", "--jobs", "2"])
    monkeypatch.setattr(precompile, "compile_one", skip)
    assert precompile.main() == 0
    out = capsys.readouterr().out
    assert "failed while recording" not in out
    assert "tree_conv" in out


def skip(job: Job, gpu: str) -> tuple[str, float, str]:
    """Stand in for a compilation, in another process."""
    return job.name, 0.1, ""
