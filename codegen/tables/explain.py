"""``bole-tune --explain KEY``: which entry a call would take on a GPU, and why not the others."""

from __future__ import annotations

import warnings
from pathlib import Path

from bole_codegen.tables.keys import depth_note, parse_key
from bole_runtime.gpus import GpuRecord
from bole_runtime.kernels.problem import DEPTH_BUCKETS, Problem
from bole_runtime.tables.lookup import Dispatcher, TableWarning, own_root_fault, tuned_roots

#: Entries listed.
MOST = 12


def explain(record: GpuRecord, key: str, out: Path, only: bool = False) -> list[str]:
    """Return lines that say what a call of a bucket takes on a GPU.

    Args:
        record: the GPU; its first device name stands for it.
        key: of the bucket, or its name.
        out: folder of own tables, which go before the shipped ones where there are any for the GPU.
        only: no others than own tables.

    Raises:
        ValueError: the key names no bucket, or no kernel serves it.
    """
    problem = parse_key(key)
    name = record.device_names[0] if record.device_names else ""
    roots = tuned_roots()
    own = (out / record.key).is_dir() and out.resolve() not in {r.resolve() for r in roots}
    if only:
        dispatcher = Dispatcher((out,), user_roots=1)
    else:
        dispatcher = Dispatcher((out, *roots) if own else None, user_roots=1 if own else None)
    limits = record.limits()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TableWarning)
        found = dispatcher.resolve(problem, name, limits)
    lines = [f"{problem.key()} on {record.title} ({name or 'no device name known'})"]
    if only:
        lines.append(f"as a process that had the tables in {out} alone would see it")
    elif own:
        lines.append(f"as a process with BOLE_TUNED_DIR={out} sees it")
        fault = own_root_fault()
        if fault is not None:
            lines.append(f"here, {fault}")
    flat = problem.replace(depth=DEPTH_BUCKETS[0]) if isinstance(problem, Problem) else problem
    every = dispatcher.ranked(flat, name)
    note = depth_note(key, problem, (entry.problem for _, entry in every))
    if note:
        lines.append(note)
    shown = 0
    for source, entry in dispatcher.ranked(problem, name):
        if shown == MOST:
            lines.append("  ...")
            break
        shown += 1
        why = dispatcher.reject(problem, entry, name, limits)
        chosen = entry == found.entry
        what = "taken" if chosen else why or "not needed: one before it is taken"
        exact = "this very bucket" if entry.problem == problem else f"bucket {entry.key}"
        lines.append(f"  {'->' if chosen else '  '} {source} {entry.path}: {exact}, {entry.entry.label}: {what}")
    if not shown:
        lines.append("     no table has an entry that could stand in")
    lines.append(f"it runs {found.config}")
    lines.append(f"because: {found.reason}")
    lines += [f"the process would warn: {w.message}" for w in caught if issubclass(w.category, TableWarning)]
    return lines
