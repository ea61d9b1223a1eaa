"""``bole-tune``: search kernels for a GPU, check them, write a table."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace

from optuna.exceptions import ExperimentalWarning

from bole_codegen import actions
from bole_codegen.arguments import UsageError, make_parser, options_of, targets_of
from bole_codegen.closing import document, finish
from bole_codegen.measure.watch import Watch
from bole_codegen.pipes import GONE, flush_output
from bole_codegen.places import Files, check_report, files_of
from bole_codegen.render import render
from bole_codegen.report import make_progress
from bole_codegen.say import say
from bole_codegen.search.database import without_password
from bole_codegen.search.deadline import WRITE_UP
from bole_codegen.search.evaluators import MeasuredEvaluator
from bole_codegen.search.journal import StorageError
from bole_codegen.search.offline import OfflineEvaluator
from bole_codegen.search.outcome import RunResult
from bole_codegen.search.pool import WorkerStartError
from bole_codegen.search.quality import Closeness, closeness_json, compare
from bole_codegen.search.results import CandidateError
from bole_codegen.search.session import Session
from bole_codegen.tables import gather, predicted_gpu
from bole_codegen.tables.writer import LockTimeout
from bole_codegen.which_gpu import gpu_of
from bole_runtime.gpus import GpuRecord
from bole_runtime.kernels.variants import get_variant
from bole_runtime.tables.checks import cache_dir
from bole_runtime.tables.load import TableError
from bole_runtime.tables.words import counted

INTERRUPTED = 130
#: Of the time budget, for the search of --exhaustive; the rest is for everything else there is.
SEARCH_PART = 0.4


def _evaluator(
    args: argparse.Namespace, record: GpuRecord, log: str | None, watch: Watch | None = None
) -> MeasuredEvaluator | OfflineEvaluator:
    if args.offline:
        return OfflineEvaluator(record, get_variant, render, args.workers, log)
    locks = cache_dir() / "search"
    return MeasuredEvaluator(record, render, args.devices, args.seed, args.workers, log=log, locks=locks, watch=watch)


def _session(args: argparse.Namespace, record: GpuRecord, files: Files, begun: float) -> Session:
    targets = targets_of(args)
    if args.exhaustive and len(targets) != 1:
        raise UsageError(f"--exhaustive tries everything in one bucket, these options name {len(targets)}")
    options = options_of(args)
    if files.report is not None:
        check_report(files.report, "--out" if args.report is None else "--report")
    if options.time_budget is not None:
        if args.exhaustive:
            # Both are within the budget, and a search beside nothing says nothing.
            options = replace(options, time_budget=SEARCH_PART * options.time_budget)
        assert options.time_budget is not None
        # What it took to start says how fast this machine is just now, and so how long the report will take.
        slow = max(WRITE_UP, 1.5 * (time.monotonic() - begun))
        options = replace(options, write_up=min(slow, 0.25 * options.time_budget))
    watch = Watch([] if args.offline else args.devices, say)
    watch.begin()
    evaluator = _evaluator(args, record, files.log, watch)
    return Session(
        record=record,
        gpu=predicted_gpu(record) if args.offline else gather(record, args.devices[0]),
        targets=targets,
        evaluator=evaluator,
        options=options,
        storage=files.storage,
        out=args.out,
        fresh=args.fresh,
        seed=args.seed,
        progress=make_progress(args.quiet, budget=options.time_budget),
        begun=begun,
        watch=watch,
    )


def _age() -> float:
    """Return for how many seconds this process has been there: imports count in a time budget too."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rsplit(")", 1)[1].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _act(args: argparse.Namespace, action: str) -> int:
    """Do something with tables that exist."""
    try:
        if action == "diff":
            return actions.diff(args)
        if action == "stale":
            return actions.stale(args)
        record = gpu_of(args)
        if action == "explain":
            return actions.explain_key(args, record)
        if action == "reproduce":
            return actions.reproduce_key(args, record)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
    if action == "show":
        return actions.show(args, record)
    if args.offline:
        raise UsageError("--verify runs every entry: it needs the GPU")
    return actions.verify(args, record, lambda watch: _evaluator(args, record, files_of(args, record).log, watch))


def _exhaust(args: argparse.Namespace, session: Session, result: RunResult, files: Files) -> Closeness:
    """Try everything in the one bucket that was searched, in what is left of the time budget.

    Raises:
        ValueError: there is nothing to compare with, or no time.
    """
    if not result.buckets or session.driver is None:
        raise ValueError("the search found nothing to compare")

    def tell(done: int, of: int) -> None:
        if not args.quiet and (done == of or done % 50 == 0):
            say(f"exhaustive: {done} of {counted(of, 'candidate')}")

    budget = options_of(args).time_budget
    left = None if budget is None else max(0.0, budget - 1.0 - (time.monotonic() - (session.begun or 0.0)))
    evaluator = _evaluator(args, session.record, files.log)
    try:
        searched = result.buckets[0]
        return compare(session.driver.environment, evaluator, searched, result.tried, tell, seconds=left)
    finally:
        evaluator.close()


def _closeness(args: argparse.Namespace, session: Session, result: RunResult, files: Files, interrupted: bool) -> int:
    """Say how close the search came to trying everything; with ``--json``, in the document of the search."""
    found: dict[str, object] = {"error": "interrupted"}
    status = INTERRUPTED
    try:
        if not interrupted:
            closeness = _exhaust(args, session, result, files)
            found, status = closeness_json(closeness), 0
            if not args.json:
                print(closeness)
    except KeyboardInterrupt:
        say("interrupted while everything was tried, which is not kept; what the search found is in its table")
    except (ValueError, WorkerStartError, CandidateError) as error:
        found, status = {"error": str(error)}, 1
        say(f"bole-tune: --exhaustive: {error}")
    if args.json:
        print(document(session, result, found))
    return status


def _run(args: argparse.Namespace, command: str, begun: float) -> int:
    action = actions.chosen(args)
    if action is not None:
        return _act(args, action)
    record = gpu_of(args)
    files = files_of(args, record)
    session = _session(args, record, files, begun)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _search(args, session, files, command)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _search(args: argparse.Namespace, session: Session, files: Files, command: str) -> int:
    """Search, and say what was found."""
    ended: KeyboardInterrupt | StorageError | None = None
    try:
        result = session.run()
    except (KeyboardInterrupt, StorageError) as error:
        result = session.driver.result if session.driver else RunResult()
        if isinstance(error, StorageError) and not result.buckets:
            raise
        ended = error
    finally:
        session.evaluator.close()
    session.watch.end()
    written = finish(args, session, result, files, command)
    status = 0 if result.entries and written else 1
    if args.exhaustive:
        status = _closeness(args, session, result, files, ended is not None) or status
    if isinstance(ended, StorageError):
        raise ended
    if ended is not None:
        where = "a database" if "://" in files.storage else files.storage
        say(f"interrupted. Finished evaluations are kept in {where}; to go on from there:\n    {command}")
        return INTERRUPTED
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bole-tune`` and return its exit status.

    Returns:
        0 done, 1 failed, 2 wrong usage, 130 interrupted, 141 whoever read the output is gone.
    """
    try:
        status = _main(argv)
    except BrokenPipeError:
        flush_output()
        return GONE
    except SystemExit:  # Of --help, and of arguments that do not parse.
        if isinstance(flush_output(), BrokenPipeError):
            return GONE
        raise
    lost = flush_output()
    if lost is None:
        return status
    if isinstance(lost, BrokenPipeError):
        return GONE
    say(f"bole-tune: {lost}")
    return 1


def _shown(argument: str) -> str:
    """Return an argument as reports may show it: the URL of a storage may hold a password."""
    option, equals, url = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    return f"{option}{equals}{without_password(url)}" if "://" in url else argument


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(arguments)
    # --fresh would forget what was finished.
    command = shlex.join(["bole-tune", *(_shown(a) for a in arguments if a != "--fresh")])
    # Filters are of the process, and threads of ours make samplers: one filter for all, set before any.
    warnings.filterwarnings("ignore", category=ExperimentalWarning)
    try:
        return _run(args, command, time.monotonic() - (_age() if argv is None else 0.0))
    except UsageError as error:
        say(f"bole-tune: {error}")
        return 2
    except BrokenPipeError:
        raise
    except (TableError, StorageError, WorkerStartError, LockTimeout, CandidateError, OSError, ValueError) as error:
        say(f"bole-tune: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted before anything was tried")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
