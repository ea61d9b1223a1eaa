"""The relay of interpreter tests: they run under the variable, and every outcome reaches the parent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.interpreter
def test_a_kernel_runs_interpreted() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def double(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)

    x = torch.arange(5, dtype=torch.float32)
    out = torch.zeros(8)
    double[(1,)](x, out, 5, BLOCK=8)
    assert out.tolist() == [0, 2, 4, 6, 8, 0, 0, 0]


def test_the_parent_keeps_compiling() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the whole run is interpreted")
    triton = pytest.importorskip("triton")
    assert not triton.knobs.runtime.interpret


CASES = """
import os
import time
import pytest

pytestmark = pytest.mark.interpreter

@pytest.fixture
def broken_teardown():
    yield
    raise RuntimeError("teardown broke")

@pytest.mark.parametrize("n", [1, 2])
def test_pass(n): assert os.environ["TRITON_INTERPRET"] == "1"
def test_fail(): assert 1 + 1 == 3, "wrong sum"
def test_skip(): pytest.skip("not here")
@pytest.mark.xfail(strict=True)
def test_xfail(): assert False
def test_teardown(broken_teardown): pass
def test_die(): os._exit(7)
def test_after_death(): pass
@pytest.mark.timeout(1)
def test_hang(): time.sleep(60)
"""

# A marked test after a plain one of its module: what the plain one has set up must be torn down before the next module.
MIXED = """
import os
import pytest

@pytest.fixture(scope="module", autouse=True)
def module_wide():
    os.environ["MIXED"] = "set up"
    yield
    del os.environ["MIXED"]

def test_here(): assert "TRITON_INTERPRET" not in os.environ
@pytest.mark.interpreter
def test_there(): assert os.environ["TRITON_INTERPRET"] == "1"
"""

PLAIN = """
import os
def test_plain(): assert not {"TRITON_INTERPRET", "MIXED"} & os.environ.keys()
"""


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], ["-n", "2"]], ids=["one process", "xdist"])
def test_outcomes_reach_the_parent(tmp_path: Path, extra: list[str]) -> None:
    if extra:
        pytest.importorskip("xdist")
    pytest.importorskip("pytest_timeout")
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "test_mixed.py").write_text(MIXED)
    (tmp_path / "test_plain.py").write_text(PLAIN)
    markers = "\n    ".join(f"{m}: m" for m in ("gpu", "slow", "interpreter", "exhaustive"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS / 'helpers'}\nmarkers =\n    {markers}\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TRITON_INTERPRET"))}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--rootdir", str(tmp_path), *extra],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "3 failed, 7 passed, 1 skipped, 1 xfailed, 1 error" in run.stdout, run.stdout + run.stderr
    assert "wrong sum" in run.stdout
    assert "teardown broke" in run.stdout
    assert "it ended with status 7" in run.stdout
    assert "Timeout" in run.stdout
