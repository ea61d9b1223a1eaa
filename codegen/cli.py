"""``bole-tune``: search kernels for a GPU, check them, write a table."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optuna.exceptions import ExperimentalWarning

from bole_codegen import actions
from bole_codegen.arguments import UsageError, make_parser, options_of, targets_of
from bole_codegen.measure.watch import Watch
from bole_codegen.pipes import GONE, flush_output
from bole_codegen.places import check_places, check_report
from bole_codegen.render import render
from bole_codegen.report import (
    as_json,
    earlier_line,
    failures_line,
    make_progress,
    missing_lines,
    offline_line,
    results_table,
    write_report,
)
from bole_codegen.say import say
from bole_codegen.search.deadline import WRITE_UP
from bole_codegen.search.evaluators import MeasuredEvaluator
from bole_codegen.search.journal import StorageError
from bole_codegen.search.ledger import describe
from bole_codegen.search.offline import OfflineEvaluator
from bole_codegen.search.outcome import RunResult
from bole_codegen.search.pool import WorkerStartError
from bole_codegen.search.quality import closeness_json, compare
from bole_codegen.search.results import PASSING_KINDS, CandidateError
from bole_codegen.search.session import Session
from bole_codegen.tables import gather, predicted_gpu
from bole_codegen.tables.writer import LockTimeout
from bole_runtime import gpus
from bole_runtime.gpus import GpuRecord, UnknownGpuError
from bole_runtime.kernels.variants import get_variant
from bole_runtime.tables.checks import cache_dir
from bole_runtime.tables.load import TableError

INTERRUPTED = 130


@dataclass(frozen=True)
class _Files:
    storage: str
    log: str
    report: Path | None


def _present(index: int) -> str | None:
    """Return the name of a CUDA device, None when there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        has = "device 0 alone" if count == 1 else f"devices 0 to {count - 1}"
        raise UsageError(f"--devices {index}: this machine has {has}")
    return torch.cuda.get_device_name(index)


def _gpu_of(args: argparse.Namespace) -> GpuRecord:
    """Return the GPU to tune for, making sure that it is the one present unless offline.

    Raises:
        UsageError: it is not.
    """
    if len(set(args.devices)) != len(args.devices):
        raise UsageError(f"--devices names a device twice: {','.join(map(str, args.devices))}")
    try:
        named = gpus.get(args.gpu) if args.gpu else None
    except UnknownGpuError as error:
        raise UsageError(str(error)) from error
    if named is not None and not named.supported:
        raise UsageError(f"{named.title} is not supported: {named.reason}")
    without = [f"--{a}" for a in ("offline", "show", "explain", "reproduce") if getattr(args, a)]
    if without:
        if named is None:
            raise UsageError(f"{without[0]} needs --gpu, the GPU to work for")
        return named
    name = _present(args.devices[0])
    offline = f"add --offline to compile for {named.title if named else 'a named GPU'} without one"
    if args.verify:
        # Its entries have to run: nothing offline stands in for that.
        offline = "--verify runs every entry on the GPU of its table; without one, --show and --stale read tables"
    if name is None:
        raise UsageError(f"this machine has no CUDA GPU; {offline}")
    for index in args.devices[1:]:
        other = _present(index)
        if other != name:
            raise UsageError(
                f"--devices: device {index} is {other!r}, device {args.devices[0]} is {name!r}; one table is of one GPU"
            )
    found = gpus.identify(name)
    if found is None:
        raise UsageError(f"{gpus.explain_device_name(name)}; {offline}")
    if named is not None and named.key != found.key:
        raise UsageError(
            f"this machine has {found.title} ({name!r}), not {named.title}; run with --gpu {found.key}"
            f"{'; ' if args.verify else ', or '}{offline}"
        )
    if not found.supported:
        raise UsageError(f"{found.title} is not supported: {found.reason}")
    return found


def _files(args: argparse.Namespace, record: GpuRecord) -> _Files:
    folder = cache_dir() / "search"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = folder / f"{record.key}-workers.log"
    log.unlink(missing_ok=True)
    report = None if args.no_report else args.report or args.out / record.key / "report.html"
    storage = args.storage or str(folder / f"{record.key}.journal")
    check_places(args.out / record.key, storage, report)
    return _Files(storage, str(log), report)


def _evaluator(
    args: argparse.Namespace, record: GpuRecord, log: str | None, watch: Watch | None = None
) -> MeasuredEvaluator | OfflineEvaluator:
    if args.offline:
        return OfflineEvaluator(record, get_variant, render, args.workers, log)
    locks = cache_dir() / "search"
    return MeasuredEvaluator(record, render, args.devices, args.seed, args.workers, log=log, locks=locks, watch=watch)


def _session(args: argparse.Namespace, record: GpuRecord, files: _Files, begun: float) -> Session:
    targets = targets_of(args)
    if args.exhaustive and len(targets) != 1:
        raise UsageError(f"--exhaustive tries everything in one bucket, these options name {len(targets)}")
    options = options_of(args)
    if files.report is not None:
        check_report(files.report, "--out" if args.report is None else "--report")
    if options.time_budget is not None:
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


def _summary(args: argparse.Namespace, session: Session, result: RunResult, files: _Files, paths: list[str]) -> None:
    """Print the table, and say what is missing."""
    label = session.evaluator.label
    if args.json:
        print(as_json(result, session.record.key, label, paths))
    elif result.entries:
        print(results_table(result.entries))
        print()
    for line in missing_lines(result, len(session.targets)):
        say(line)
    say(f"{result.tried} candidates in {result.seconds:.0f} s; {failures_line(result.failures)}")
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
        say(f"{len(session.kept)} measured entries were kept: a prediction never replaces a measurement")
    if result.out_of_time:
        say("the time budget ended the search; the same command goes on from here, --time-budget gives it longer")
    for path in paths:
        say(f"table ({label}): {path}")


def _finish(args: argparse.Namespace, session: Session, result: RunResult, files: _Files, command: str) -> bool:
    """Print what was found, write the report; return whether it could be written.

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
        record = _gpu_of(args)
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
    return actions.verify(args, record, lambda watch: _evaluator(args, record, _files(args, record).log, watch))


def _exhaust(args: argparse.Namespace, session: Session, result: RunResult, files: _Files) -> None:
    """Try everything in the one bucket that was searched."""
    assert session.driver is not None
    evaluator = _evaluator(args, session.record, files.log)

    def tell(done: int, of: int) -> None:
        if not args.quiet and (done == of or done % 50 == 0):
            say(f"exhaustive: {done} of {of} candidates")

    try:
        found = compare(session.driver.environment, evaluator, result.buckets[0], result.tried, tell)
    finally:
        evaluator.close()
    print(json.dumps({**closeness_json(found)}) if args.json else str(found))


def _run(args: argparse.Namespace, command: str, begun: float) -> int:
    action = actions.chosen(args)
    if action is not None:
        return _act(args, action)
    record = _gpu_of(args)
    files = _files(args, record)
    session = _session(args, record, files, begun)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    interrupted = False
    try:
        result = session.run()
    except KeyboardInterrupt:
        interrupted = True
        result = session.driver.result if session.driver else RunResult()
    finally:
        session.evaluator.close()
        signal.signal(signal.SIGTERM, previous)
    session.watch.end()
    written = _finish(args, session, result, files, command)
    if interrupted:
        where = "a database" if "://" in files.storage else files.storage
        say(f"interrupted. Finished evaluations are kept in {where}; to go on from there:\n    {command}")
        return INTERRUPTED
    if args.exhaustive and result.entries:
        _exhaust(args, session, result, files)
    return 0 if result.entries and written else 1


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


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(arguments)
    # --fresh would forget what was finished.
    command = shlex.join(["bole-tune", *(a for a in arguments if a != "--fresh")])
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
