#!/usr/bin/env python3
"""Sets up a checkout and runs its two main jobs. Needs Python 3.10 or later with venv, and nothing else.

    python3 tools/dev.py tune [bole-tune arguments]   search into bole-out; without arguments a short one
    python3 tools/dev.py test [pytest arguments]      ruff, mypy and the tests
    python3 tools/dev.py test --gpu [...]             the GPU tests alone, on a machine with a GPU
    python3 tools/dev.py lint                         ruff and mypy
    python3 tools/dev.py setup                        only the environment, in .venv
    python3 tools/dev.py tune --help                  more about one of these, at once

The first run creates .venv and installs the project in editable mode; later runs find it done and start at once.
If the Python that runs this already has torch with a working CUDA device and Triton, .venv uses those and installs
no others. Everything else comes from pip as it is configured on the machine (PIP_FIND_LINKS and PIP_NO_INDEX help
on a machine without a network).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "bole-setup.json"
# Pairs of torch and Triton known to work, in the order they are tried.
CONSTRAINTS = ("constraints.txt", "constraints-cuda.txt")
# Asks the Python that runs this script whether it has a torch that should be used as it is.
PROBE = """
import json, site, sys
try:
    import torch, triton
    found = bool(torch.cuda.is_available())
except Exception:
    found = False
print(json.dumps({"torch": torch.__version__, "triton": triton.__version__,
                  "paths": [p for p in sys.path if p.endswith("-packages")]} if found else None))
"""

# Prints the key of the GPU present, if there is one that Bole has a record of.
GPU_KEY = """
import torch
from bole_runtime import gpus
record = gpus.identify(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
print(record.key if record is not None and record.supported else "")
"""
# One model's geometry in one bucket: minutes, not the hour of a whole table.
SHORT_SEARCH = ["--model", "qwen3.5-9b", "--nodes", "16", "--batch", "8", "--precision", "lossless"]
# What bole-tune does with tables that exist; without --out it reads those of the checkout.
READS_TABLES = ("--show", "--diff", "--explain", "--reproduce", "--verify", "--stale", "--version")

HELP = {
    "tune": """python3 tools/dev.py tune [bole-tune arguments]

Runs bole-tune in the checkout. Without arguments: one model's geometry in one bucket, about two minutes. To a search
it adds, unless they are given:

    --out bole-out   so that the tables of the checkout, in tuned/, stay as they are
    --offline        on a machine without a GPU that Bole knows (not to --exhaustive); with it --gpu h100

To an action on tables that exist (--show, --diff, --explain, --reproduce, --verify, --stale) it adds nothing: they
read tuned/, or what --out names.

All options: .venv/bin/bole-tune --help, once `python3 tools/dev.py setup` made .venv; docs/tuning.md
""",
    "test": """python3 tools/dev.py test [--gpu] [pytest arguments]

Runs ruff, mypy and every test that needs no GPU, in two processes; half an hour of CPU time.
With --gpu as the first argument it runs the GPU tests alone, on a machine with a GPU.

Some tests, without ruff and mypy: .venv/bin/python -m pytest tests/tree, once `python3 tools/dev.py setup` made .venv
Options of pytest: .venv/bin/python -m pytest --help
""",
    "lint": """python3 tools/dev.py lint

Runs ruff check, ruff format --check and mypy. Takes no arguments.
""",
    "setup": """python3 tools/dev.py setup

Makes .venv and installs the project into it, editable, with what the tests and checkers need. Takes no arguments.
""",
}


def say(text: str) -> None:
    """Print a progress line, before any output of the command it announces."""
    print(f"[dev] {text}", flush=True)


def fail(text: str) -> None:
    """Stop with a message for people."""
    sys.exit(f"[dev] {text}")


def fingerprint() -> str:
    """Return a hash of the files that say what to install."""
    parts = [(ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "setup.py", *CONSTRAINTS)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read_stamp() -> dict:
    """Return what an earlier run recorded, or an empty record."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if PYTHON.exists() else {}


def base_torch() -> dict | None:
    """Return versions and paths of a CUDA torch in the Python that runs this, or None."""
    # A fresh process, outside the checkout: importing torch here would keep its memory for the whole run.
    done = subprocess.run([sys.executable, "-c", PROBE], cwd="/", capture_output=True, text=True)
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 and lines else None


def pip(*arguments: str) -> subprocess.CompletedProcess:
    """Run pip of the environment; its output is shown and kept."""
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    kept = []
    assert process.stdout is not None
    for line in process.stdout:
        kept.append(line)
        if not line.startswith("Requirement already satisfied"):
            print(line, end="", flush=True)
    return subprocess.CompletedProcess(command, process.wait(), "".join(kept), "")


def create_venv(base: dict | None) -> None:
    """Create an empty environment, which sees the base Python's packages if its torch is to be used."""
    if VENV.exists():
        shutil.rmtree(VENV)
    say(f"creating {VENV.relative_to(ROOT)} with Python {sys.version.split()[0]}")
    if subprocess.run([sys.executable, "-m", "venv", str(VENV)], cwd=ROOT).returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        fail("python3 -m venv failed; on Debian and Ubuntu install the package python3-venv")
    if base is not None:
        # Not --system-site-packages: the base Python may itself be a virtual environment.
        site_dir = next((VENV / "lib").glob("python*")) / "site-packages"
        lines = [f"import site; site.addsitedir({path!r})" for path in base["paths"]]
        (site_dir / "bole_base_python.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
        # The old setuptools that venv brings (Python 3.10, 3.11) would hide the base's.
        subprocess.run([str(PYTHON), "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"], cwd=ROOT)


def install(extra: str, base: dict | None) -> None:
    """Install the project and one extra under the constraints that suit the machine."""
    if pip("setuptools>=77").returncode != 0:
        fail("pip could not install setuptools")
    target = ["--no-build-isolation", "--editable", f".[{extra}]" if extra else "."]
    if base is not None:
        say(f"using torch {base['torch']} and Triton {base['triton']} of {sys.executable}")
        own = VENV / "bole-constraints.txt"
        own.write_text(f"torch=={base['torch']}\ntriton=={base['triton']}\n", encoding="utf-8")
        tries = (str(own),)
    else:
        tries = CONSTRAINTS
    for constraints in tries:
        say(f"installing {' '.join(target[2:])} under {Path(constraints).name}")
        done = pip("--constraint", constraints, *target)
        if done.returncode == 0:
            return
        if "ResolutionImpossible" not in done.stdout:
            break
    fail("the installation failed; pip's messages are above")


def setup(extra: str) -> None:
    """Make sure the environment exists and holds the project with an extra (``""``, ``test`` or ``dev``)."""
    if sys.version_info < (3, 10):  # noqa: UP036 - this script runs under whatever python3 is
        fail(f"Python 3.10 or later is needed, this is {sys.version.split()[0]}")
    stamp = read_stamp()
    # The base torch is probed once: a probe imports torch, and a second run should start at once.
    if (stamp.get("python"), stamp.get("root")) != (sys.version, str(ROOT)):
        base = base_torch()
        create_venv(base)
        stamp = {"python": sys.version, "root": str(ROOT), "base": base}
    if stamp.get("fingerprint") != fingerprint():
        stamp = {**stamp, "fingerprint": fingerprint(), "extras": []}
    wanted = {"": {""}, "test": {"", "test"}, "dev": {"", "test", "dev"}}[extra]
    if not wanted <= set(stamp["extras"]):
        install(extra, stamp["base"])
        stamp["extras"] = sorted(wanted | set(stamp["extras"]))
        STAMP.write_text(json.dumps(stamp), encoding="utf-8")


def run(*command: str) -> int:
    """Run a command of the environment in the checkout; return its status."""
    say(" ".join(command))
    env = {**os.environ, "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}", "VIRTUAL_ENV": str(VENV)}
    status = subprocess.run([str(VENV / "bin" / command[0]), *command[1:]], cwd=ROOT, env=env).returncode
    if status < 0:
        # A killed program says nothing itself: out of memory, for example.
        print(flush=True)
        say(f"{' '.join(command[:3])} was ended by signal {-status} ({signal.strsignal(-status)})")
    return status


def lint() -> list[str]:
    """Run every checker; return those that complain."""
    checks = {"ruff check": ("ruff", "check"), "ruff format": ("ruff", "format", "--check"), "mypy": ("mypy",)}
    return [name for name, command in checks.items() if run("python", "-m", *command) != 0]


def test(arguments: list[str]) -> int:
    """Run the checkers and the tests, or the GPU tests alone."""
    if arguments[:1] == ["--gpu"]:
        # Compiled on demand, one after the other, the kernels would take longer than the tests. A failure shows there.
        run("python", "tools/precompile.py", "--tests")
        # Serial: timings and memory of one GPU are not shared out.
        return run("python", "-m", "pytest", "-m", "gpu", *arguments[1:])
    failed = lint()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers, each with threads of its own, slow each other down
    if run("python", "-m", "pytest", "-n", "2", *arguments) != 0:
        failed.append("pytest")
    if failed:
        say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def gpu_key() -> str:
    """Return the key of the GPU of this machine, empty without one that Bole knows."""
    return subprocess.run([str(PYTHON), "-c", GPU_KEY], cwd="/", capture_output=True, text=True).stdout.strip()


def given(arguments: list[str], option: str) -> bool:
    """Return whether an option is among bole-tune's arguments, which may shorten it or hold its value after a ``=``."""
    words = [a.split("=", 1)[0] for a in arguments]
    return any(len(w) > 2 and w.startswith("--") and option.startswith(w) for w in words)


def tune_arguments(arguments: list[str]) -> list[str]:
    """Return bole-tune's arguments: a search leaves the checked-in tables alone, and does without a GPU if it must."""
    if any(given(arguments, option) for option in READS_TABLES):
        return arguments
    arguments = arguments or SHORT_SEARCH
    added = [] if given(arguments, "--out") else ["--out", "bole-out"]
    # Predictions need no trying of everything: --exhaustive goes offline only when told to.
    if not given(arguments, "--offline") and not given(arguments, "--exhaustive") and not gpu_key():
        gpu = [] if given(arguments, "--gpu") else ["--gpu", "h100"]
        say(f"no GPU that Bole knows: searching offline{' for an H100' if gpu else ''}")
        added += ["--offline", *gpu]
    return [*added, *arguments]


def tune(arguments: list[str]) -> int:
    """Run bole-tune; without arguments, a short search that fits this machine."""
    return run("bole-tune", *tune_arguments(arguments))


def main(arguments: list[str]) -> int:
    """Dispatch on the first argument."""
    job, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if job not in ("tune", "test", "lint", "setup"):
        print(__doc__)
        return 0 if job in ("-h", "--help") else 2
    if "-h" in rest or "--help" in rest:
        print(HELP[job], end="")
        return 0
    setup({"tune": "", "test": "test" if rest[:1] == ["--gpu"] else "dev"}.get(job, "dev"))
    if job == "lint":
        return 1 if lint() else 0
    return {"tune": tune, "test": test, "setup": lambda _: 0}[job](rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
