"""``bole-tune`` with a reader that stops reading: it ends without a word, as ``ls | head`` does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bole_codegen.pipes import GONE
from bole_codegen.report.html import is_report
from bole_runtime.tables.lookup import tuned_roots

KEY = "verify/gdn/dk128-dv128-g2/bf16-sfp32/raw/lossless/n16-d16-p0-w256"
SHIPPED = str(tuned_roots()[-1])
MAIN = "import sys; from bole_codegen import cli; sys.exit(cli.main(sys.argv[1:]))"
#: --verify with an evaluator that needs no GPU.
VERIFY = f"""
from types import SimpleNamespace
from bole_codegen import actions, cli, which_gpu
from bole_codegen.tables.verify import Verdict
which_gpu.present = lambda index: "NVIDIA H200"
cli._evaluator = lambda *a: SimpleNamespace(close=lambda: print("closed", file=open("closed", "w")))
def verify(entries, evaluator, default, limits, tell):
    for entry in entries:
        tell(Verdict(entry.key, "ok", ""))
    return []
actions.verify_entries = verify
{MAIN}
"""
#: A search that ends at once, with something to print.
TINY = ["--gpu", "h100", "--offline", "--hk", "1", "--hv", "2", "--dk", "32", "--dv", "32", "--nodes", "16"]
TINY += ["--ops", "commit", "--precision", "fast", "--batch", "1", "--trials", "1", "--time-budget", "0"]

pytestmark = pytest.mark.slow  # Each is a process that imports torch.


def _run(
    folder: Path, arguments: Sequence[str], code: str = MAIN, both: bool = False
) -> subprocess.CompletedProcess[bytes]:
    """Run a command whose output nobody reads any more, from its first line on."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "BOLE_CACHE_DIR": str(folder / "cache")}
    # Whoever runs the tests may have either; what is short stays in a buffer without the second.
    for name in ("BOLE_TUNED_DIR", "PYTHONUNBUFFERED"):
        environment.pop(name, None)
    try:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments], stdout=writer, stderr=writer if both else subprocess.PIPE,
            timeout=300, check=False, cwd=folder, env=environment,
        )  # fmt: skip
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "arguments",
    [
        "--gpu h200 --show",
        "--gpu h200 --show --json",
        f"--diff {SHIPPED}/h200/gdn.json {SHIPPED}/h200/kda.json",
        f"--diff {SHIPPED}/h200/gdn.json {SHIPPED}/h200/kda.json --json",
        f"--gpu h200 --explain {KEY}",
        f"--gpu h200 --explain {KEY} --json",
        f"--gpu h200 --reproduce {KEY}",
        "--gpu h200 --stale --json",
    ],
)
def test_an_action_ends_without_a_word(tmp_path: Path, arguments: str) -> None:
    done = _run(tmp_path, arguments.split())
    assert (done.returncode, done.stderr.decode()) == (GONE, "")


def test_help_ends_without_a_word(tmp_path: Path) -> None:
    done = _run(tmp_path, ["--help"])
    # argparse passes over the error itself where the text fills the buffer, which is quiet too.
    assert done.returncode in (0, GONE)
    assert done.stderr == b""


@pytest.mark.parametrize("both", [False, True])
def test_stale_entries_that_nobody_reads(tmp_path: Path, both: bool) -> None:
    table = tmp_path / "tuned" / "h200" / "gdn.json"
    table.parent.mkdir(parents=True)
    table.write_text("{}")
    done = _run(tmp_path, ["--gpu", "h200", "--stale", "--only-out"], both=both)
    assert done.returncode == GONE
    # Their number goes to stderr, which may still have a reader.
    assert (done.stderr or b"") in (b"", b"1 stale entry in 1 table: tuned/h200/gdn.json\n")


def test_a_recheck_stops_and_closes_its_workers(tmp_path: Path) -> None:
    done = _run(tmp_path, ["--gpu", "h200", "--verify"], VERIFY)
    assert (done.returncode, done.stderr.decode()) == (GONE, "")
    assert (tmp_path / "closed").read_text() == "closed\n"


def test_head_gets_its_lines(tmp_path: Path) -> None:
    """More than a pipe holds, so that the command still writes when its reader leaves."""
    command = [sys.executable, "-c", MAIN, "--gpu", "h200", "--show"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline().decode().startswith(f"{SHIPPED}/h200/conv.json: NVIDIA H200")
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(60) == GONE


@pytest.mark.parametrize("both", [False, True])
def test_a_search_keeps_what_it_found(tmp_path: Path, both: bool) -> None:
    done = _run(tmp_path, [*TINY, "--out", "out", *(["--quiet"] if both else [])], both=both)
    assert done.returncode == GONE
    assert "Traceback" not in (done.stderr or b"").decode()
    assert "Broken" not in (done.stderr or b"").decode()
    assert (tmp_path / "out" / "h100" / "gdn.json").exists()
    assert is_report(tmp_path / "out" / "h100" / "report.html")


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", MAIN, "--gpu", "h200", "--explain", KEY], stdout=full, stderr=subprocess.PIPE,
            timeout=300, check=False, cwd=tmp_path, text=True,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "bole-tune: [Errno 28] No space left on device\n")
