"""``bole-tune --reproduce KEY``: a script that runs one configuration alone, checks it and times it."""

from __future__ import annotations

from bole_codegen.search.targets import Target
from bole_runtime.kernels.space import Config
from bole_runtime.tables.load import CheckedEntry
from bole_runtime.tables.schema import launch_of

_SCRIPT = '''"""{title}

Made by bole-tune --reproduce. Runs on a CUDA GPU; with --torch on the CPU, through the torch backend.
"""

import sys

import torch

from bole_codegen.search.kinds import kind_of
from bole_codegen.search.operands import on_torch
from bole_codegen.search.targets import Target, class_of
from bole_runtime.kernels.{module} import {type}
from bole_runtime.kernels.space import Config

PROBLEM = {problem}
TABLE = {table!r}
CONFIG = Config({variant!r}, {params!r})
TARGET = Target(PROBLEM, hk={hk}, hv={hv}, batch={batch}, shape={shape!r}){usual}

on_cpu = "--torch" in sys.argv[1:]
device = "cpu" if on_cpu else "cuda"
kind = kind_of(PROBLEM)
check = kind.check(class_of(PROBLEM), device, seed={seed})
error = on_torch(lambda: check.run(None)) if on_cpu else check.run(CONFIG)
print(f"relative error against the fp64 reference: {{error:.2e}}")
if on_cpu:
    sys.exit(0)

from bole_codegen.measure import time_launches

layers = {layers}
make, nodes, each = kind.open(TARGET, layers, {seed}, device).launches(CONFIG)
timing = time_launches(make, nodes)
print(f"{{timing.median_us / each:.2f}} us a layer, spread {{timing.spread_us / each:.2f}}, {{layers}} layers{then}")
'''


def reproduce(target: Target, config: Config, layers: int, entry: CheckedEntry | None = None, seed: int = 0) -> str:
    """Return the script.

    Args:
        target: the bucket and its launch.
        config: what to run.
        layers: that keep the states cold; for a commit a multiple of those of a launch.
        entry: of a table, if that is what runs.
        seed: of inputs.
    """
    problem = target.problem
    then = ""
    if entry is not None and entry.entry.label == "measured":
        then = f"; the table has {entry.entry.median_us:.2f}"
    unsaid = entry is not None and launch_of(entry.entry) is None
    return _SCRIPT.format(
        title=f"{problem.key()} with {config}",
        problem=repr(problem),
        variant=config.variant,
        params=config.params,
        module=type(problem).__module__.rpartition(".")[2],
        type=type(problem).__name__,
        hk=target.hk,
        hv=target.hv,
        batch=target.batch,
        shape=target.shape,
        seed=seed,
        layers=layers,
        then=then,
        table=None if entry is None else entry.path,
        usual="  # A usual launch: the entry does not say which one was timed, and times may differ." if unsaid else "",
    )
