#!/usr/bin/env python3
"""Instructions, registers, spills and shared memory of generated kernels, compiled for a GPU that need not be present.

    python tools/count_instructions.py --nodes 64 --precision fast --variant default
    python tools/count_instructions.py --nodes 16 --variant "two_stage(orient=nodes, ...)"

Instructions are static: loops count once, and so do paths that hardly ever run.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tabulate import tabulate
from verify_bench.candidates import parse_config

from bole_codegen.compile import compile_offline
from bole_codegen.compile.offline import machine_code
from bole_codegen.render import render
from bole_runtime import gpus
from bole_runtime.kernels import default_config
from bole_runtime.kernels.problem import Problem, row_buckets, work_bucket

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/", re.MULTILINE)


def instructions(cubin: bytes) -> int:
    """Return the number of machine instructions of a kernel."""
    return len(_INSTRUCTION.findall(machine_code(cubin)))


def main(argv: list[str] | None = None) -> int:
    """Print a row a kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--variant", default="default", help="a verify configuration as it is printed, or the analytic default")
    add("--gpu", default="h200", help="key of the GPU (%(default)s)")
    add("--nodes", type=int, default=16, help="nodes a request (%(default)s)")
    add("--depth", type=int, default=8, help="largest number of strict ancestors (%(default)s)")
    add("--pending", type=int, default=0, help="capacity of the pending chain (%(default)s)")
    add("--batch", type=int, default=64, help="requests (%(default)s)")
    add("--precision", choices=["fast", "lossless"], default="fast", help="profile (%(default)s)")
    add("--state-dtype", default="fp32", help="of the state (%(default)s)")
    args = parser.parse_args(argv)
    limits = gpus.get(args.gpu).limits()
    nodes, pending = row_buckets("verify", args.nodes, args.pending)
    problem = Problem(
        "verify", "gdn", 128, 128, 2, "bf16", args.state_dtype, "raw", args.precision,
        nodes, args.depth, pending, work_bucket(args.batch, 32),
    )  # fmt: skip
    config = default_config(problem, limits) if args.variant == "default" else parse_config(args.variant)
    print(config)
    rows = []
    for kernel in render(problem, config):
        made = compile_offline(kernel, problem, limits)
        name = kernel.plan.template.removesuffix(".py.jinja")
        found = (instructions(made.cubin), made.registers, made.spill_bytes, made.shared_bytes, made.programs_per_sm())
        rows.append((name, kernel.plan.num_warps, *found))
    headers = ["kernel", "warps", "instructions", "registers", "spilled bytes", "shared bytes", "programs an SM"]
    print(tabulate(rows, headers=headers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
