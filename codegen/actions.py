"""What ``bole-tune`` does with tables that exist: show, compare, explain, recheck, reproduce."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from bole_codegen.measure.watch import Watch
from bole_codegen.say import say
from bole_codegen.search.kinds import kind_of
from bole_codegen.search.results import CandidateError
from bole_codegen.search.targets import Target
from bole_codegen.tables.diff import changes_json, describe_changes, diff_entries, read_entries
from bole_codegen.tables.explain import explain
from bole_codegen.tables.found import Found, find_tables, read_tables
from bole_codegen.tables.keys import depth_note, parse_key
from bole_codegen.tables.reproduce import reproduce
from bole_codegen.tables.show import show_json, show_text
from bole_codegen.tables.stale import stale_entries
from bole_codegen.tables.verify import Verdict, target_of, verify_entries
from bole_runtime import gpus
from bole_runtime.gpus import GpuRecord
from bole_runtime.kernels.default import default_config
from bole_runtime.kernels.space import Config
from bole_runtime.kernels.variants import all_variants
from bole_runtime.tables.load import load_table
from bole_runtime.tables.words import counted, entries

#: The script should run where the table was not made: as many layers as fit into this, where one does.
_ELSEWHERE = 24 << 30
#: Of the memory of a GPU; the rest is the context's, and what a check needs beside the inputs.
_USABLE = 0.85
#: Of entries written before they said so.
_UNSAID = "{} not say how many heads and requests were timed: a usual launch of the bucket is taken, times may differ"
#: Names of the options, of which one run does one.
ACTIONS = ("show", "diff", "explain", "reproduce", "verify", "stale")


def chosen(args: argparse.Namespace) -> str | None:
    """Return the action asked for, None for a search."""
    return next((a for a in ACTIONS if getattr(args, a) not in (None, False)), None)


def diff(args: argparse.Namespace) -> int:
    """Print what changed from one table or folder to another."""
    old, new = args.diff
    changes = diff_entries(read_entries(old), read_entries(new))
    print(json.dumps(changes_json(changes), indent=2) if args.json else describe_changes(changes))
    return 0


def _found(args: argparse.Namespace, record: GpuRecord) -> Found:
    """Return the tables of a GPU, having said what is wrong with them."""
    found = read_tables(record, args.out, args.only_out)
    for fault in (*found.faults, *found.skipped):
        say(f"warning: {fault}")
    return found


def _none(args: argparse.Namespace, record: GpuRecord) -> str:
    """Return what to say where a GPU has no table."""
    stand_in = f"; the runtime uses those of {', '.join(record.tables_from)}" if record.tables_from else ""
    return f"bole-tune: no table for {record.key} in {args.out}{'' if args.only_out else ' or shipped'}{stand_in}"


def stale(args: argparse.Namespace) -> int:
    """Print the entries tuned for another template, spec or schema; status 1 when there are any."""
    records = [gpus.get(args.gpu)] if args.gpu else list(gpus.all_records())
    found: list[dict[str, str]] = []
    read: list[str] = []
    # Every file on its own: an entry may be stale that another stands before.
    for path in dict.fromkeys(p for r in records for p in find_tables(r, args.out, args.only_out)):
        read.append(str(path))
        try:
            table = load_table(path, all_variants)
        except ValueError as error:
            found.append({"table": str(path), "key": "", "reason": str(error)})
            continue
        found += [{"table": str(path), "key": s.key, "reason": s.reason} for s in stale_entries(table)]
    if args.json:
        print(json.dumps({"tables": len(read), "read": read, "stale": found}, indent=2))
    else:
        for one in found:
            print(f"{one['table']}: {one['key']}: {one['reason']}" if one["key"] else one["reason"])
    # A reader that is gone wants no more words; the next line would swallow that.
    sys.stdout.flush()
    where = f": {', '.join(read)}" if read else ""
    say(f"{entries(len(found), 'stale')} in {counted(len(read), 'table')}{where}")
    return 1 if found else 0


def show(args: argparse.Namespace, record: GpuRecord) -> int:
    """Print the tables of a GPU; status 1 where there is none, or one cannot be read."""
    found = _found(args, record)
    if args.json:
        show_json(record.key, found)
    else:
        show_text(found)
    if not found.tables and not found.faults:
        say(_none(args, record))
    return 0 if found.tables and not found.faults else 1


def explain_key(args: argparse.Namespace, record: GpuRecord) -> int:
    """Print what a call of a bucket takes."""
    lines = explain(record, args.explain, args.out, args.only_out)
    data = {"key": parse_key(args.explain).key(), "gpu": record.key, "lines": lines}
    print(json.dumps(data) if args.json else "\n".join(lines))
    return 0


def _layers(target: Target, record: GpuRecord) -> int:
    """Return how many layers a script runs.

    Raises:
        ValueError: the GPU cannot hold one.
    """
    whole = int(_USABLE * record.memory_gib * (1 << 30))
    layer_count = kind_of(target.problem).layer_count
    try:
        return layer_count(target, record.l2_bytes, min(_ELSEWHERE, whole))
    except CandidateError:
        pass
    try:
        return layer_count(target, record.l2_bytes, whole)
    except CandidateError as error:
        raise ValueError(f"{target.problem.key()} does not fit {record.title}: {error.message}") from None


def reproduce_key(args: argparse.Namespace, record: GpuRecord) -> int:
    """Print a script that runs the kernel of a table's entry, or the analytic default where there is none."""
    problem = parse_key(args.reproduce)
    found = _found(args, record)
    note = depth_note(args.reproduce, problem, (e.problem for e in found.entries))
    if note:
        say(f"bole-tune: {note}")
    entry = next((e for e in found.entries if e.key == problem.key()), None)
    config: Config = entry.config if entry is not None else default_config(problem, record.limits())
    target = target_of(problem, None if entry is None else entry.entry)
    layers = _layers(target, record)
    if entry is None:
        say(f"bole-tune: no table has {problem.key()} ({found.line}); this runs the analytic default")
    script = reproduce(target, config, layers, entry, args.seed)
    if args.json:
        print(
            json.dumps(
                {
                    "key": problem.key(),
                    "gpu": record.key,
                    "table": None if entry is None else entry.path,
                    "script": script,
                }
            )
        )
    else:
        print(script, end="")
    return 0


def verify(args: argparse.Namespace, record: GpuRecord, make: Callable[[Watch], Any]) -> int:
    """Check and time every entry of the tables of the GPU present; status 1 when one failed.

    Args:
        args: of the command line.
        record: the GPU.
        make: makes the evaluator, which tells the watch of its devices when it compared.
    """
    found = _found(args, record)
    checked = list(found.entries)
    # What cannot be read was not checked.
    unread = bool(found.faults or found.skipped)
    data = {
        "gpu": record.key,
        "device": {},
        "read": [str(one.path) for one in found.tables],
        "faults": [*found.faults, *found.skipped],
        "counts": {},
        "entries": [],
    }
    if not checked:
        if args.json:
            print(json.dumps(data, indent=2))
        say("bole-tune: no entry to check" if found.tables or unread else _none(args, record))
        return 1

    def tell(verdict: Verdict) -> None:
        if not args.quiet and not args.json:
            print(f"{verdict.status:7} {verdict.key}: {verdict.message}", flush=True)

    # Times are compared with those of a table: what else they depend on than kernels is said with them.
    watch = Watch(args.devices, say)
    watch.begin()
    evaluator = make(watch)
    try:
        verdicts = verify_entries(checked, evaluator, default_config, record.limits(), tell)
    finally:
        evaluator.close()
    watch.end()
    counts: dict[str, int] = {}
    for verdict in verdicts:
        counts[verdict.status] = counts.get(verdict.status, 0) + 1
    if args.json:
        device = {name: text for name, text in watch.facts().items() if text}
        found_now = {"device": device, "counts": counts, "entries": [asdict(v) for v in verdicts]}
        print(json.dumps({**data, **found_now}, indent=2))
    unsaid = sum(v.launch is not None and not v.launch_recorded for v in verdicts)
    if unsaid:
        say(_UNSAID.format(f"{entries(unsaid)} {'does' if unsaid == 1 else 'do'}"))
    say(found.line)
    if watch.line():
        say(f"clocks: {watch.line()}")
    say(f"{entries(len(verdicts))}: " + ", ".join(f"{n} {s}" for s, n in sorted(counts.items())))
    return 1 if counts.get("failed") or unread else 0
