#!/usr/bin/env python3
"""Compiles kernels ahead, over all cores, into Triton's cache.

    python tools/precompile.py --tests           the kernels of the GPU tests, for the GPU present or an H200
    python tools/precompile.py --tests --list    only count and name them

A GPU need not be present. A launch takes a kernel from the cache when the same Triton compiled it for the same compute
capability.
"""

from __future__ import annotations

import argparse
import collections
import os
import signal
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))


def present_gpu() -> str | None:
    """Return the key of the GPU of this machine, or None."""
    import torch

    from bole_runtime import gpus

    record = gpus.identify(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return record.key if record is not None and record.supported else None


def start_worker() -> None:
    """Prepare a process that records or compiles."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the tables that the default stands in for are not the point here


def record_share(gpu: str, share: int, shares: int) -> tuple[dict, list[str]]:
    """Run every ``shares``-th body of the plan; return the compilations asked for, and what failed."""
    from bole_testing.gpu_plan import bodies
    from bole_testing.recording import recording

    from bole_runtime import gpus

    failed = []
    with recording(gpu) as made:
        for i, (name, body) in enumerate(bodies("cpu", gpus.get(gpu).limits())):
            if i % shares != share:
                continue
            try:
                body()
            except Exception as error:  # what it asked for until then still counts
                failed.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    return made.jobs, failed


def compile_one(job, gpu: str) -> tuple[str, float, str]:
    """Compile one kernel; return its name, the seconds, and why it failed, if it did."""
    from bole_testing.recording import compile_job

    try:
        return job.name, compile_job(job, gpu), ""
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return job.name, 0.0, f"{type(error).__name__}: {lines[-1][:200]}"


def size(job) -> int:
    """Return what grows with the time that a kernel takes to compile."""
    return (job.problem.nodes + job.problem.pending) * getattr(job.problem, "dk", 1)


def main() -> int:
    """Record, then compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", action="store_true", required=True, help="the kernels of the GPU tests")
    parser.add_argument("--gpu", default=None, help="key of the GPU; default, the one present, else h200")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--list", action="store_true", help="compile nothing")
    options = parser.parse_args()
    gpu = options.gpu or present_gpu() or "h200"
    started = time.perf_counter()
    jobs: dict = {}
    failures = []
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), start_worker) as pool:
        shares = 4 * options.jobs
        for done in as_completed([pool.submit(record_share, gpu, i, shares) for i in range(shares)]):
            found, failed = done.result()
            jobs.update(found)
            failures += failed
        for text in sorted(failures):
            print(f"failed while recording: {text}")
        kinds = collections.Counter(job.name.split("_k")[0].removeprefix("gdn_") for job in jobs.values())
        print(
            f"{len(jobs)} compilations of {len({j.name for j in jobs.values()})} kernels for {gpu}, found in "
            f"{time.perf_counter() - started:.0f} s: " + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
        )
        if options.list:
            for job in sorted(jobs.values(), key=lambda j: j.name):
                print(f"  {job.name}  {job.config}")
            return 1 if failures else 0
        # Large tiles first: they take longest.
        order = sorted(jobs.values(), key=size, reverse=True)
        errors, spent, slowest = [], 0.0, (0.0, "")
        for done in as_completed([pool.submit(compile_one, job, gpu) for job in order]):
            name, seconds, error = done.result()
            spent, slowest = spent + seconds, max(slowest, (seconds, name))
            if error:
                errors.append(name)
                print(f"does not compile: {name}: {error}", flush=True)
    print(f"{len(jobs) - len(errors)} compiled in {time.perf_counter() - started:.0f} s, {spent:.0f} s of work")
    print(f"slowest: {slowest[1]}, {slowest[0]:.0f} s")
    return 1 if errors or failures else 0


def stop(*_: object) -> None:
    """End at once: leaving the pool waits for what is being compiled, and for good if a process died at its queue."""
    for child in active_children():
        child.kill()
    os._exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stop)
    sys.exit(main())
