"""The end of a search: what is printed of it, and its report."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from bole_codegen.places import Files
from bole_codegen.report import (
    as_json,
    earlier_line,
    failures_line,
    missing_lines,
    offline_line,
    results_table,
    write_report,
)
from bole_codegen.say import say
from bole_codegen.search.ledger import describe
from bole_codegen.search.outcome import RunResult
from bole_codegen.search.results import PASSING_KINDS
from bole_codegen.search.session import Session
from bole_runtime.tables.words import counted, entries


def document(session: Session, result: RunResult, exhaustive: Mapping[str, object] | None = None) -> str:
    """Return all that a run found as one JSON document."""
    paths = [str(p) for p in session.paths]
    return as_json(result, session.record.key, session.evaluator.label, paths, exhaustive)


def finish(args: argparse.Namespace, session: Session, result: RunResult, files: Files, command: str) -> bool:
    """Print what was found, write the report; return whether it could be written.

    With ``--json`` and ``--exhaustive`` the document comes later, from :func:`document`: there is to be one.

    Args:
        args: of the command line.
        session: the run.
        result: what it found.
        files: where it writes.
        command: that goes on with it, for the report.

    Raises:
        BrokenPipeError: nobody reads what is printed. The report, a file, is written first.
    """
    paths = [str(p) for p in session.paths]
    gone: BrokenPipeError | None = None
    try:
        _summary(args, session, result, files, paths)
    except BrokenPipeError as error:
        gone = error
    if files.report is not None and result.buckets:
        # What a search found is printed by now, whatever happens to the disk.
        try:
            _report(args, session, result, files.report, command, paths)
        except OSError as error:
            say(f"bole-tune: cannot write the report: {error}")
            return False
        say(f"report: {files.report}")
    if gone is not None:
        raise gone
    return True


def _report(
    args: argparse.Namespace, session: Session, result: RunResult, path: Path, command: str, paths: list[str]
) -> None:
    capability = ".".join(map(str, session.gpu.compute_capability))
    facts = {
        "GPU": f"{session.gpu.device_name} (compute capability {capability})",
        "driver, CUDA": " ".join(x for x in (session.gpu.driver, session.gpu.cuda) if x),
        "Triton, torch, ptxas": ", ".join((session.gpu.triton, session.gpu.torch, session.gpu.ptxas)),
        **session.watch.facts(),
        "command": command,
        "tables": ", ".join(paths),
    }
    bandwidth = session.evaluator.bandwidth_gbs or result.bandwidth_gbs
    write_report(path, result, session.record, session.evaluator.label, facts, bandwidth)


def _summary(args: argparse.Namespace, session: Session, result: RunResult, files: Files, paths: list[str]) -> None:
    """Print the table, and say what is missing."""
    label = session.evaluator.label
    if args.json:
        if not args.exhaustive:
            print(document(session, result))
    elif result.entries:
        print(results_table(result.entries))
        print()
    for line in missing_lines(result, len(session.targets)):
        say(line)
    say(f"{counted(result.tried, 'candidate')} in {result.seconds:.0f} s; {failures_line(result.failures)}")
    if result.resumed:
        say(earlier_line(result))
    if result.spent:
        say(f"where the time went: {describe(result.spent)}")
    if label == "predicted" and result.entries:
        say(offline_line(result.entries))
    if result.failures and os.path.isfile(files.log) and os.path.getsize(files.log):
        say(f"what their processes printed: {files.log}")
    if any(result.failures.get(kind) for kind in PASSING_KINDS):
        say("some candidates had no turn on the device, which others used; the same command tries them again")
    if session.kept:
        were = "was" if len(session.kept) == 1 else "were"
        say(f"{entries(len(session.kept), 'measured')} {were} kept: a prediction never replaces a measurement")
    if result.out_of_time:
        say("the time budget ended the search; the same command goes on from here, --time-budget gives it longer")
    for path in paths:
        say(f"table ({label}): {path}")
